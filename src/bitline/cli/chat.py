"""`bitline run --interactive`: a conversation in the terminal."""

from __future__ import annotations

from bitline.cli.console import out
from bitline.cli.run import RunOptions, load, print_text, show_plan
from bitline.errors import InputError
from bitline.model.generate import generate
from bitline.model.plan import plan
from bitline.model.tokenizer import encode_chat
from bitline.model.transformers_logging import suppress_transformers_logging

PROMPT = "> "


def converse(model: str, options: RunOptions) -> None:
    """Answer the lines of standard input, each with the conversation before it, until the input ends or a line is /exit.

    A line that no longer fits the model's context ends the conversation with an InputError.
    """
    with suppress_transformers_logging():
        loaded = load(model, options)
        if not getattr(loaded.tokenizer, "chat_template", None):
            raise InputError("the checkpoint's tokenizer has no chat template", fix="leave --interactive out, and give --prompt")
        show_plan(plan(loaded.network), loaded)
        out.print("\n/exit or the end of the input ends the conversation")
        messages: list[dict[str, str]] = []
        while (line := _next_line()) is not None:
            messages.append({"role": "user", "content": line})
            answer = generate(
                loaded.network, loaded.tokenizer, encode_chat(loaded.tokenizer, messages), on_text=print_text,
                max_new_tokens=options.max_new_tokens, sampling=options.sampling,
            )  # fmt: skip
            messages.append({"role": "assistant", "content": answer.text})
            speed = f"{answer.decode_tokens_per_second:.1f} tokens/s"
            out.print(f"\n[dim]first token {answer.first_token_seconds * 1e3:.0f} ms, {speed}[/]", highlight=False)


def _next_line() -> str | None:
    """The next line with text; None at the end."""
    while True:
        try:
            line = input(PROMPT).strip()
        except EOFError:
            return None
        if line == "/exit":
            return None
        if line:
            return line
