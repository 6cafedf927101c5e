"""A script and everything it uses of this project, as one file that runs alone.

    python -m tools.single_file grpo > FILE.py      # or cispo, distill

Of each module that the script imports, directly or not, the functions, classes and constants that the script
reaches are kept as they stand, with their comments; imports of other packages are collected at the top. What
would mean something else in one file, or cannot be followed, ends in one line and exit status 2.
"""
import argparse
import ast
import inspect
import re
import symtable
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Module:
    """A source file of the project, cut into its statements."""
    file: str
    doc: str            # the docstring as it stands there
    statements: list    # of (name, text with the comments above, number of blank lines above, section)
    kept: set           # the numbers of those that the script reaches
    ours: dict          # imported name -> the project's module it comes from
    others: dict        # imported name -> (what it means, the lines that import it)


def module_path(name, root):
    """The file of the project's module `name`; None if that is another package's."""
    stem = root.joinpath(*name.split("."))
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)


def read_imports(module, tree, root):
    """Note the names that a module imports; a ValueError where one file could not do the same."""
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    for node, alias in ((node, alias) for node in imports for alias in node.names):
        is_from, at_top = isinstance(node, ast.ImportFrom), node in tree.body
        source, name = node.module or "" if is_from else alias.name, alias.asname or alias.name
        ours = is_from and node.level or module_path(source, root)
        if name == "*" or ours and not (is_from and at_top and not node.level and not alias.asname):
            raise ValueError(f"{module.file}:{node.lineno}: {ast.unparse(node)}: must be `from MODULE import "
                             f"NAME` at the top level")
        if ours:
            module.ours[name] = source
        elif at_top:        # an import inside a function stays there
            line = ast.unparse(ast.ImportFrom(source, [alias], 0) if is_from else ast.Import([alias]))
            name = name if is_from or alias.asname else name.split(".")[0]      # import a.b binds a ..
            meaning = line if is_from or alias.asname else f"import {name}"     # .. as import a does
            module.others.setdefault(name, (meaning, set()))[1].add(line)


def read_module(name, root):
    """The project's module `name`, taken apart."""
    path = module_path(name, root)
    text = path.read_text(encoding="utf-8")
    tree, lines, end, section = ast.parse(text), text.splitlines(), 0, ""
    module = Module(path.relative_to(root).as_posix(), "", [], set(), {}, {})
    read_imports(module, tree, root)
    for node in tree.body:
        above = lines[end:min(n.lineno for n in (node, *getattr(node, "decorator_list", ()))) - 1]
        code, end = lines[end + len(above):node.end_lineno], node.end_lineno
        for divider in [line for line in above if re.match("# -{8,} ", line)]:
            section, above = divider, above[above.index(divider) + 1:]
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        name = getattr(node, "name", getattr(target, "id", None))       # of a function or class; a constant
        if node is tree.body[0] and ast.get_docstring(tree) is not None:
            module.doc = "\n".join(code)
        elif name or ast.unparse(node).startswith("if __name__ == '__main__':"):
            blank = next((i for i, line in enumerate(above) if line), len(above))
            module.statements.append((name, "\n".join(above[blank:] + code), blank, section))
        elif not isinstance(node, (ast.Import, ast.ImportFrom)):
            raise ValueError(f"{module.file}:{node.lineno}: must be a function, a class or NAME = VALUE")
    return module


def global_names(text):
    """The names that a piece of code takes from around it: no attributes, no local variables."""
    tables = [symtable.symtable(text, "-", "exec")]
    for table in tables:        # grows while it is walked
        tables += table.get_children()
    return sorted({s.get_name() for table in tables for s in table.get_symbols() if s.is_global()})


def gather(script, root):
    """The modules of a script, each behind those it imports, with .kept filled; lines of other imports."""
    modules, imports, meanings = {}, set(), {}

    def read(name):
        if name not in modules:
            module = modules[name] = read_module(name, root)
            for wanted, source in module.ours.items():
                read(source)
                if wanted not in {s[0] for s in modules[source].statements} | modules[source].ours.keys():
                    raise ValueError(f"{module.file}: {modules[source].file} does not define {wanted}")
            modules[name] = modules.pop(name)       # to the end

    def reach(module, name):
        """Keep what a name means in a module, and all that this uses."""
        if name in module.ours:
            return reach(modules[module.ours[name]], name)
        own = {i for i, statement in enumerate(module.statements) if statement[0] == name}
        meaning, lines = (module.file, ()) if own else module.others.get(name, ("Python's own", ()))
        if meanings.setdefault(name, meaning) != meaning:
            raise ValueError(f"{name} means two things: {meanings[name]} and {meaning}")
        imports.update(lines)
        for i in own - module.kept:
            module.kept.add(i)
            for used in global_names(module.statements[i][1]):
                reach(module, used)

    read(script)
    for statement in modules[script].statements:        # all of the script, used or not
        reach(modules[script], statement[0])
    return list(modules.values()), imports


def single_file(script, root=ROOT):
    """The text of a script with everything it uses of the project."""
    modules, imports = gather(script, root)
    lines = [modules[-1].doc, f"# Made by: python -m tools.single_file {script} > FILE.py"]
    for other in (False, True):         # the standard library, then the rest; import before from
        group = [line for line in imports
                 if (re.split("[ .]", line)[1] not in sys.stdlib_module_names) == other]
        lines += ["", *sorted(group, key=lambda line: (line[0] == "f", line))] if group else []
    for module in [module for module in modules if module.kept]:
        # what its docstring says first, and its letters of shape comments; the script's is at the top
        doc = inspect.cleandoc(ast.literal_eval(module.doc or "''")).split("\n\n")
        said = doc[:1] + [part for part in doc[1:] if "Letters in shape comments" in part]
        lines += ["", "", f"# {'=' * 64} {module.file}", *textwrap.wrap(
            " ".join(said) if module is not modules[-1] else "", 110, initial_indent="# ",
            subsequent_indent="# ")]
        section = ""
        for i in sorted(module.kept):
            before, (_, text, blank, section) = section, module.statements[i]
            blank = blank if i - 1 in module.kept else 2
            lines += [*([""] * blank if section == before else ["", "", section, ""]), text]
    return "\n".join(lines) + "\n"


def main(argv=None):
    parser = argparse.ArgumentParser("tools.single_file", description=single_file.__doc__)
    parser.add_argument("script", choices=("grpo", "cispo", "distill"))
    try:
        text = single_file(parser.parse_args(argv).script)
    except ValueError as e:
        parser.exit(2, f"tools.single_file: error: {e}\n")
    sys.stdout.reconfigure(encoding="utf-8")        # whatever the terminal speaks
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
