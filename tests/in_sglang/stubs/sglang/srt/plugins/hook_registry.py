import functools
import pkgutil
from collections import defaultdict
from enum import Enum


class HookType(Enum):
    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


class HookRegistry:
    _hooks = defaultdict(list)  # noqa: RUF012
    _patched = set()  # noqa: RUF012

    @classmethod
    def register(cls, target, hook, hook_type=HookType.AFTER, *, source=None):
        cls._hooks[target].append((hook_type, hook, source))

    @classmethod
    def apply_hooks(cls):
        for target, hooks in cls._hooks.items():
            if target in cls._patched:
                continue
            cls._patched.add(target)
            path, name = target.rsplit(".", 1)
            holder = pkgutil.resolve_name(path)
            raw = holder.__dict__[name]
            function = getattr(holder, name)
            for _, hook, _ in hooks:
                function = functools.wraps(function)(functools.partial(hook, function))
            setattr(holder, name, staticmethod(function) if isinstance(raw, staticmethod) else _method(function))


def _method(function):
    return lambda *args, **kwargs: function(*args, **kwargs)
