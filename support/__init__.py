"""What carries the algorithms, and teaches none of them. Nobody has to look in here before they want to.

    checkpoint  Hugging Face folders and MiniMind .pth, in and out
    chat        tokenizer and chat template; which tokens of a conversation are an answer
    prompts     JSON Lines -> prompts, and conversations to train on
    answers     find the answer of a text, bring it to a normal form, compare
    run         processes, device, folder, log, resume, signals; the ending of a script
"""
import json


class InputError(Exception):
    """Something the user gave is wrong. The scripts print the one line and end with exit status 2."""


def read_json(path):
    """The JSON object in a file, or an InputError that says what is wrong with it."""
    try:
        with open(path, encoding="utf-8") as f:
            value = json.load(f)
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"{path}: cannot be read ({getattr(e, 'strerror', None) or e})") from None
    except (ValueError, RecursionError) as e:
        line, why = getattr(e, "lineno", 1), getattr(e, "msg", e)
        raise InputError(f"{path}:{line}: not valid JSON ({why})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: must hold a JSON object, not a {type(value).__name__}")
    return value
