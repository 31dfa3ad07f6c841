from dataclasses import dataclass, field


@dataclass
class WeightsMapper:
    orig_to_new_substr: dict = field(default_factory=dict)
    orig_to_new_prefix: dict = field(default_factory=dict)
    orig_to_new_suffix: dict = field(default_factory=dict)

    def apply_list(self, values):
        out = []
        for name in values:
            for old, new in self.orig_to_new_prefix.items():
                name = new + name.removeprefix(old) if name.startswith(old) else name
            out.append(name)
        return out
