"""Flags, config files and overrides of every command, and one way to refuse bad input.

A command collects all problems and raises one `RefusedError`; `__main__` prints it and exits with
`EXIT_REFUSED`.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.util
import inspect
import re
import textwrap
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_collections
import yaml
from absl import flags
from ml_collections import config_dict, config_flags

EXIT_REFUSED = 2
WORKDIR = "folder of the results (default runs/COMMAND-CONFIG)"
NO_CONFIG = "--config is missing: give --config=configs/diloco.py, or another method's"
OWN = ":"  # in the name of what is not in the package: module:function
_CONFIGS = Path(__file__).resolve().parent.parent / "configs"
_RUN, _COMPARISON = ("method", "steps", "regions"), ("variants", "common")
# Fields that tell a command's config from those of the others, and where such configs are.
_OF_ITS_OWN = {
    "train": (_RUN, "configs"),
    "launch": (_RUN, "configs"),
    "quick": (_COMPARISON, "configs/compare"),
    "compare": (_COMPARISON, "configs/compare"),
    "plan": (("methods",), "configs/plan"),
    "plan --target": (_RUN, "configs"),
    "plan --goodput": (("chip_mtbf_hours",), "configs/plan/goodput.py"),
}
_EXAMPLES = {  # of a folder, for who names no config
    "configs/compare": "configs/compare/quick.py",
    "configs/plan": "configs/plan/template.py",
}
_OVERRIDE = re.compile(r"--?config\.([\w.]+)(?:=(.*))?$", re.DOTALL)


class Field(NamedTuple):
    """A field of a command's config.

    Attributes:
      default: a type = unset, and text is read as it.
      about: what the field is.
    """

    default: Any
    about: str


def defaults(fields: Mapping[str, Field]) -> ml_collections.ConfigDict:
    """The config that has these fields, by dotted names, with their defaults."""
    config = ml_collections.ConfigDict()
    for name, field in fields.items():
        prefix, _, last = name.rpartition(".")
        if prefix and prefix not in config:
            config[prefix] = ml_collections.ConfigDict()
        unset = isinstance(field.default, type)
        holder = config[prefix] if prefix else config
        holder[last] = config_dict.placeholder(field.default) if unset else field.default
    return config


class RefusedError(Exception):
    """Input that cannot work: every problem in one list, found before any work starts."""

    def __init__(self, problems: Sequence[str], title: str = "cannot start"):
        super().__init__(title)
        self.title = title
        self.problems = list(problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return f"{self.title}: {self.problems[0]}"
        return f"{self.title}, {len(self.problems)} problems:\n" + "\n".join(
            f"  - {problem}" for problem in self.problems
        )


class EndedError(Exception):
    """Why a command ended that was not refused, in a line; `code` is its exit code."""

    code = 1


class HelpShown(Exception):
    """Help was asked for and printed: the command has nothing else to do."""


def problems_of(build: Callable[[], Any], prefix: str = "") -> tuple[Any, list[str]]:
    """Call `build`, and turn the ValueError or TypeError that it raises into problems.

    Args:
      prefix: put before each problem.

    Returns:
      (its result, []) or (None, `lines_of` the error).
    """
    try:
        return build(), []
    except (ValueError, TypeError) as error:
        return None, [prefix + line for line in lines_of(error)]


def lines_of(error: Exception) -> list[str]:
    """What an error says: its lines where it is `Refused`, else its text as one line."""
    # `lowcomm_jax.refused.Refused`, whose import would make the list of commands wait for JAX.
    return getattr(error, "lines", None) or [" ".join(map(str.strip, str(error).splitlines()))]


def refuse_any(problems: Sequence[str], title: str = "cannot start") -> None:
    """Raise `RefusedError` where there are problems."""
    if problems:
        raise RefusedError(problems, title)


def made_or_refused(build: Callable[[], Any], title: str, prefix: str = "") -> Any:
    """Give what `build()` returns; its ValueError or TypeError becomes a `RefusedError`."""
    made, problems = problems_of(build, prefix)
    refuse_any(problems, title)
    return made


def closest(name: str, known: Sequence[str]) -> str:
    """`; did you mean X?` for a near miss, else the known names."""
    found = difflib.get_close_matches(name, known, n=2, cutoff=0.6)
    if found:
        return f"; did you mean {' or '.join(found)}?"
    return f"; known: {', '.join(known)}" if known else ""


def named_function(
    name: str, label: str, fits: Callable[[Any], bool] = callable, what: str = "function"
) -> Callable[..., Any]:
    """The function, or the class, that a config names as `module:function`.

    Args:
      label: the field that names it, for the error.
      fits: whether what stands there may be named.
      what: what may be named, for the error.

    Raises:
      ValueError: it is no such name, there is no such module, it cannot be imported, or has no such
        function.
    """
    module, own, attribute = str(name).partition(OWN)
    if not own:
        fix = "a size of the built-in one is model.preset" if label == "model" else "no such name"
        raise ValueError(f"{label}={name!r}: {fix}; your own: module:function")
    if not module or not attribute:
        lacks = what if module else "module"
        raise ValueError(f"{label}={name!r}: it names no {lacks}: write module:{what}")
    # Here: JAX comes with it, for which the list of commands does not wait.
    from lowcomm_jax.refused import imported

    there = imported(module, f"{label}={name!r}")
    found = getattr(there, attribute, None)
    if not fits(found):
        names = [key for key, value in vars(there).items() if fits(value)]
        near = closest(attribute, names) if len(names) < 20 else ""
        raise ValueError(f"{label}={name!r}: {module} has no {what} {attribute!r}{near}")
    return found


def plain_type(hint: Any, other: type = str) -> type:
    """The type that a field without a value takes its text as: the first plain one of its hint.

    Args:
      other: where the hint names no plain type.
    """
    kinds = typing.get_args(hint) or (hint,)
    return next((kind for kind in kinds if kind in (int, float, bool, str)), other)


def model_section(name: str, **settings: Any) -> ml_collections.ConfigDict:
    """The config's `model` section of a model of one's own.

    It has `name`, `init_from` (the workdir of another run of the same model), and every keyword of
    the factory. Defaults that no config.json can hold are left to the factory.

    Args:
      name: `module:factory`.
      settings: keywords of the factory; others take its default.

    Raises:
      ValueError: see `named_function`; or the factory takes what the section has already.
    """
    factory, section = named_function(name, "model"), ml_collections.ConfigDict({"name": name})
    section.init_from = config_dict.placeholder(str)
    try:
        hints = typing.get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
    except (NameError, TypeError):  # imported for type checkers alone; a partial function
        hints = {}
    storable = bool | int | float | str | tuple | list | Mapping
    parameters = inspect.signature(factory).parameters
    if taken := [key for key in section if key in parameters]:
        fix = "fields of the section have this name: rename it there"
        raise ValueError(f"model={name!r}: it takes {' and '.join(taken)}; {fix}")
    for key, parameter in parameters.items():
        value = settings.get(key, parameter.default)
        if value is None or value is inspect.Parameter.empty:
            if parameter.kind is not parameter.VAR_KEYWORD:
                section[key] = config_dict.placeholder(plain_type(hints.get(key), object))
        elif isinstance(value, storable):
            section[key] = value
    for key in settings:
        if key not in section:
            section[key] = settings[key]  # for a factory that takes any; else refused later
    return section


class Flags:
    """The flags of one command: `flags = Flags(); flags.text("workdir", None, "folder")`."""

    def __init__(self):
        self.values = flags.FlagValues()

    def text(self, name: str, default: str | None, about: str) -> None:
        flags.DEFINE_string(name, default, about, flag_values=self.values)

    def whole(self, name: str, default: int | None, about: str) -> None:
        flags.DEFINE_integer(name, default, about, flag_values=self.values)

    def real(self, name: str, default: float | None, about: str) -> None:
        flags.DEFINE_float(name, default, about, flag_values=self.values)

    def several(self, name: str, about: str) -> None:
        """A text that may be given several times; [] = not at all."""
        flags.DEFINE_multi_string(name, [], about, flag_values=self.values)

    def switch(self, name: str, about: str) -> None:
        flags.DEFINE_bool(name, False, about, flag_values=self.values)


def parse_flags(
    command: str,
    argv: Sequence[str],
    values: flags.FlagValues,
    docstring: str | None = None,
    config: str | None = None,
) -> list[str]:
    """Parse a command's own flags, and add `--help`; return the positional arguments.

    Args:
      docstring: of the command, printed where help is asked for; None = the command looks itself.
      config: path of the config whose fields may be meant; None = there is none.

    Raises:
      RefusedError: an unknown flag (with suggestions) or a value of the wrong type.
      HelpShown: help was asked for, and printed.
    """
    flags.DEFINE_bool("help", False, "show this help", short_name="h", flag_values=values)
    argv = [_underscored(argument, values) for argument in argv]
    try:
        rest = values([command, *argv])[1:]
    except flags.UnrecognizedFlagError as error:
        known = [f"--{name}" for name in values if name == values[name].name]  # no short ones
        hint = closest(f"--{error.flagname}", known)
        if config and error.flagname in fields(load_config(config, [])[0]):
            hint = f"; a field of the config is set by --config.{error.flagname}=VALUE"
        raise RefusedError([f"unknown flag --{error.flagname}{hint}"], command) from error
    except flags.Error as error:
        raise RefusedError([_illegal(str(error), values)], command) from error
    if values.help and docstring is not None:
        show_help(values, docstring)
        raise HelpShown
    return rest


def _illegal(problem: str, values: flags.FlagValues) -> str:
    """A parser's problem with the value of a flag, with what to give instead."""
    found = re.match(r"flag (--(\w+)=.*?): ", problem, re.DOTALL)
    kind = _KINDS_OF_FLAGS.get(values[found[2]].flag_type()) if found else None
    return f"{found[1]}: give {kind}" if found and kind else problem


def listed(text: str) -> tuple[str, ...]:
    """The names in a text that commas separate."""
    return tuple(filter(None, text.split(",")))


def unexpected(rest: Sequence[str], config: Mapping[str, Any]) -> list[str]:
    """A line for every positional argument; one like `steps=3` is told how a field is set."""
    lines, known = [], fields(config)
    for argument in rest:
        setting = argument.removeprefix("config.")
        name, equals, _ = setting.partition("=")
        fix = f"; write --config.{setting}" if equals and name in known else ""
        lines.append(f"unexpected argument {argument!r}{fix}")
    return lines


def _underscored(argument: str, values: flags.FlagValues) -> str:
    """`--print-config` as `--print_config`, where that is a flag."""
    name, equals, value = argument.partition("=")
    flag = name.removeprefix("--").replace("-", "_")
    return f"--{flag}{equals}{value}" if name.startswith("--") and flag in values else argument


def show_help(values: flags.FlagValues, docstring: str | None) -> None:
    """Print a command's docstring and flags."""
    print((docstring or "").strip() + "\n\nFlags:")
    for name in sorted(values):
        flag = values[name]
        if name != flag.name:
            continue  # the short name of another flag
        default = "" if flag.default in (None, "", []) else f" (default {flag.default})"
        print(f"  --{name}: {flag.help}{default}")


def split_config(argv: Sequence[str]) -> tuple[str | None, list[tuple[str, str]], list[str]]:
    """Separate `--config=PATH` and `--config.FIELD=VALUE` from the other arguments.

    Returns:
      (path or None, overrides as (field, text), the other arguments).
    """
    path, overrides, others = None, [], []
    stream = iter(argv)
    for argument in stream:
        found = _OVERRIDE.match(argument)
        if found:
            value = found.group(2)
            overrides.append((found.group(1), next(stream, "") if value is None else value))
        elif argument in ("--config", "-config"):
            path = next(stream, "")
        elif argument.startswith(("--config=", "-config=")):
            path = argument.partition("=")[2]
        else:
            others.append(argument)
    return path, overrides, others


def load_config(
    path: str, overrides: Sequence[tuple[str, str]]
) -> tuple[ml_collections.ConfigDict, list[str]]:
    """Load a config file and apply every override.

    Args:
      path: a Python file with `get_config()`, or its bare name in configs/ (`diloco`); behind a
        colon the argument of `get_config` (`configs/diloco.py:paper`).
      overrides: (dotted field, text of the value).

    Returns:
      (config, problems of the overrides).

    Raises:
      RefusedError: no such file, or its `get_config` refuses.
    """
    file, colon, variant = path.partition(":")
    found = find_config(file)
    get_config = _function_in(found)
    try:
        config = get_config(*([variant] if colon else []))
    except (ValueError, TypeError) as error:
        raise RefusedError(lines_of(error), f"--config={path}") from error
    except Exception as error:  # the file is anybody's code
        raise RefusedError([_raised_in(found, error)]) from error
    if isinstance(config, Mapping):
        prefix = f"--config={path}: "
        make = functools.partial(ml_collections.ConfigDict, dict(config))
        config = made_or_refused(make, "cannot start", prefix)
    if not isinstance(config, ml_collections.ConfigDict):
        kind = type(config).__name__
        fix = "let it return a config, as experiments.config.base does"
        raise RefusedError([f"--config={path}: its get_config() returns {kind}: {fix}"])
    # Fields of all runs last: another override may say which config they are of. Sections before
    # their fields: `model=module:factory` says which fields there are.
    overrides = sorted(overrides, key=lambda x: (x[0].startswith("common."), x[0].count(".")))
    problems = [_override_any(config, *change) for change in overrides]
    return config, [problem for problem in problems if problem]


def bare_name(path: str) -> str:
    """The name of a config as in `--config=`, without its folder and the argument behind a colon.

    >>> bare_name("configs/diloco.py:paper")
    'diloco'
    """
    return Path(path.partition(":")[0]).stem


def config_asked_for(
    command: str,
    argv: Sequence[str],
    options: Flags,
    docstring: str | None,
    about: Callable[[ml_collections.ConfigDict], Mapping[str, str]],
    default: str = "",
) -> tuple[ml_collections.ConfigDict, str, list[tuple[str, str]]]:
    """The config of a command that works by one; help lists its fields, too.

    Args:
      command: a name of `_OF_ITS_OWN`.
      options: the command's flags, which are parsed.
      docstring: of the command.
      about: of a config what its fields are, see `listing`.
      default: the config where the line names none; "" = it must.

    Returns:
      (config with the overrides, the folder of results unless another one is named, overrides).

    Raises:
      RefusedError: everything that is wrong with the line, or the config is for another command.
      HelpShown: help was asked for, and printed.
    """
    title, (_, folder) = command.partition(" ")[0], _OF_ITS_OWN[command]
    path, overrides, others = split_config(argv)
    chosen = path or default
    rest = parse_flags(title, others, options.values, config=chosen)
    if options.values.help:
        show_help(options.values, docstring)
        if not chosen:
            raise HelpShown
    if not chosen:
        missing = NO_CONFIG
        if folder in _EXAMPLES:
            example = _EXAMPLES[folder]
            missing = f"--config is missing: give --config={example}, or another of {folder}"
        raise RefusedError([*unexpected(rest, {}), missing], title)
    config, problems = config_of(command, chosen, overrides, rest)
    refuse_any(problems, title)
    if options.values.help:
        print("\n" + listing(config, about(config)))
        raise HelpShown
    return config, f"runs/{title}-{bare_name(path)}" if path else f"runs/{title}", overrides


def config_of(
    command: str, path: str, overrides: Sequence[tuple[str, str]], rest: Sequence[str] = ()
) -> tuple[ml_collections.ConfigDict, list[str]]:
    """The config that a command is given, and the problems of its line.

    Args:
      command: a name of `_OF_ITS_OWN`.
      path, overrides: see `load_config`.
      rest: positional arguments, of which such a command takes none.

    Raises:
      RefusedError: no such config, it refuses, or it lacks what every config of this command has.
    """
    find_config(path.partition(":")[0], command)
    config, problems = load_config(path, overrides)
    needed, folder = _OF_ITS_OWN[command]
    lacks = [field for field in needed if field not in config]
    if lacks:
        those = f"{folder}, or one" if folder.endswith(".py") else f"one of {folder}, or another"
        fix = f"give {those} like it"
        if command == "plan" and "chip_mtbf_hours" in config:
            fix = "it says what fails: add --goodput"
        elif command == "plan" and "method" in config:
            fix += "; or compile this training config: add --target=h100:1x8"
        what = f"--config={path} is not for {command} (it has no {', '.join(lacks)}): {fix}"
        raise RefusedError([what], command)
    return config, unexpected(rest, config) + problems


@contextlib.contextmanager
def values_refused(title: str) -> Iterator[None]:
    """A context in which a ValueError is about what the command was given: it becomes a refusal."""
    try:
        yield
    except ValueError as error:
        raise RefusedError(lines_of(error), title) from error


def refuse_incomplete(config: Mapping[str, Any], whole: Mapping[str, Any], maker: str) -> None:
    """Let no config pass that was not made by the function that gives every field.

    Args:
      whole: what that function gives.
      maker: its dotted name.

    Raises:
      RefusedError: fields are missing, or None where that stands for nothing.
    """
    lacks = [name for name in whole if name not in config]
    if lacks:
        raise RefusedError([f"the config has no {', '.join(lacks)}: make it with {maker}"])
    unset = [name for name in whole if config[name] is None and whole[name] is not None]
    refuse_any([f"{name}=None: give a value, as {whole[name]!r}" for name in unset])


def _at(config: Mapping[str, Any], name: str) -> Any:
    for part in name.split("."):
        config = config[part]
    return config


def _function_in(file: str) -> Callable[..., ml_collections.ConfigDict]:
    """`get_config` of a config file, which is an ordinary Python module."""
    spec = importlib.util.spec_from_file_location(f"config{Path(file).stem}", file)
    if spec is None or spec.loader is None:
        raise RefusedError([f"--config={file}: no Python file; give one that ends in .py"])
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the file is anybody's code
        raise RefusedError([_raised_in(file, error)]) from error
    if "get_config" not in vars(module):
        raise RefusedError(
            [f"--config={file}: it defines no get_config(); add one that returns a config"]
        )
    return module.get_config


def _raised_in(file: str, error: Exception) -> str:
    """One line on what a config file raised, with the last line of that file that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    if isinstance(error, SyntaxError) and error.filename == file:
        lines, error = [error.lineno], type(error)(error.msg)
    where = f", line {lines[-1]}" if lines and lines[-1] else ""
    unknown = re.match(r"""["']*Key "(\w+)" does not exist""", str(error))
    if unknown:  # the error's own text has every field of the config with its value
        name, near = unknown[1], re.findall(r'Did you mean "(\w+)"', str(error))
        return f"--config={file}{where}: {name}: there is no such field{closest(name, near)}"
    return f"--config={file}{where}: {type(error).__name__}: {error}"


def find_config(file: str, command: str = "train") -> str:
    """The path of a config file given by path or by bare name.

    Args:
      command: a name of `_OF_ITS_OWN`, whose configs are listed.

    Raises:
      RefusedError: there is no such file; lists near misses.
    """
    candidates = [Path(file), _CONFIGS.parent / file, _CONFIGS / f"{file}.py"]
    for candidate in candidates:
        if file and candidate.is_file():
            return str(candidate)
    title, folder = command.partition(" ")[0], _OF_ITS_OWN[command][1]
    if folder != "configs":
        alone = {path for _, path in _OF_ITS_OWN.values() if path.endswith(".py")} - {folder}
        there = sorted((_CONFIGS.parent / folder).glob("*.py")) or [_CONFIGS.parent / folder]
        names = {f.stem: str(f.relative_to(_CONFIGS.parent)) for f in there}
        names = {k: v for k, v in names.items() if k != "__init__" and v not in alone}
        near = difflib.get_close_matches(Path(file).stem, names, n=1)
        hint = f"; did you mean {names[near[0]]}?" if near else closest("", [*names.values()])
        raise RefusedError([f"--config={file}: there is no such file{hint}"], title)
    known = sorted(f.stem for f in _CONFIGS.glob("*.py") if f.stem not in ("__init__", "network"))
    stem, below = Path(file).stem, {f.stem: f for f in _CONFIGS.glob("*/*.py")}
    near = difflib.get_close_matches(stem, [*known, *below], n=1)
    hint = closest(stem, known)
    if near and near[0] not in known:
        hint = f"; did you mean {below[near[0]].relative_to(_CONFIGS.parent)}?"
    raise RefusedError([f"--config={file}: there is no such file{hint}"], "cannot start")


def has_config(name: str) -> bool:
    """Whether configs/ has a file of this bare name."""
    return (_CONFIGS / f"{name}.py").is_file()


_OF_FACTORIES = ("channels", "hands_out", "servers")  # fields of a `Method` that no text can name
_KINDS = {int: "a whole number", float: "a number", bool: "true or false"}
_KINDS_OF_FLAGS = {kind.__name__: words for kind, words in _KINDS.items()}


def _override_any(config: ml_collections.ConfigDict, field: str, text: str) -> str | None:
    """`override`, where `common.X` of a comparison is any field X of its runs."""
    name, reference = field.removeprefix("common."), None
    if isinstance(config, ml_collections.ConfigDict) and name != field:
        reference = _config_of_runs(config)
    if reference is None:
        return override(config, field, text)
    problem = override(reference, name, text)
    if problem is not None:
        return problem.replace("--config.", "--config.common.")
    # A chosen size has a `common` of its own, which takes the place of the other one.
    sizes = config.get("sizes", {}).values()
    for holder in (part for part in (config, *sizes) if "common" in part):
        with config.unlocked():
            _put(holder["common"], name, _at(reference, name))
    return None


def _config_of_runs(config: Mapping[str, Any]) -> ml_collections.ConfigDict | None:
    """The train config of a comparison's first variant; None = it has none."""
    parts = [config, *config.get("sizes", {}).values()]
    entries = [e for part in parts if "variants" in part for e in part["variants"].values()]
    for entry in entries:
        if "config" in entry and isinstance(entry["config"], str):
            try:
                return config_of_variant(config["common"], entry)
            except RefusedError:
                return None  # the command says what is wrong with it
    return None


def config_of_variant(
    common: Mapping[str, Any], entry: Mapping[str, Any]
) -> ml_collections.ConfigDict:
    """The train config of a variant, with its own values and with its model's fields.

    Args:
      common: fields of all variants, of which only a model of one's own counts.
      entry: made by `compare.config.variant`.

    Raises:
      RefusedError: there is no such config, or no such model.
    """
    config, _ = load_config(entry["config"], [])
    for changes in (common, entry.get("set", {})):
        model = changes.get("model", {})
        if model.get("name") is not None:
            settings = {k: v for k, v in model.items() if k != "name"}
            with config.unlocked():
                make = functools.partial(model_section, model["name"], **settings)
                config.model = made_or_refused(make, "cannot compare")
    return config


def _put(config: ml_collections.ConfigDict, name: str, value: Any) -> None:
    *parents, last = name.split(".")
    for part in parents:
        if part not in config or not isinstance(config[part], ml_collections.ConfigDict):
            config[part] = ml_collections.ConfigDict()
        config = config[part]
    if last in config:
        del config[last]
    config[last] = value


def override(config: ml_collections.ConfigDict, field: str, text: str) -> str | None:
    """Set one field from text of its type; return what is wrong, or None."""
    *parents, last = field.split(".")
    holder = config
    for name in [*parents, last]:
        if not isinstance(holder, ml_collections.ConfigDict) or name not in holder:
            if parents == ["method"] and name in _OF_FACTORIES:
                fix = "write a factory that sets it, and name that (docs/add_a_method.md)"
                return f"--config.{field}: not a setting of a config; {fix}"
            near, part = closest(field, fields(config)), ".".join(parents)
            if last == "name" and part in fields(config):  # without settings, whose name is a field
                near = f"; write --config.{part}={text}"
            return f"--config.{field}: there is no such field{near}"
        holder, above = holder[name], holder
    if text == "None":
        above[last] = None
        return None
    if parents and isinstance(above[last], ml_collections.ConfigDict) and "name" in above[last]:
        with config.unlocked():  # a named part with its settings becomes one with its defaults
            del above[last]
            above[last] = ml_collections.FieldReference(text, field_type=object)
        return None
    if field in ("model", "model.name") and isinstance(config["model"], ml_collections.ConfigDict):
        return _override_model(config, text)
    if isinstance(above[last], ml_collections.ConfigDict) and not text.startswith("{"):
        below = f"{field}.name" if "name" in above[last] else f"{field}.FIELD"
        return f"--config.{field}={text}: a section of fields; set one, as --config.{below}=..."
    if above.get_type(last) is object and text.startswith("{"):
        return _override_by_mapping(above, last, f"--config.{field}={text}")
    values, arguments = flags.FlagValues(), ["config", f"--config.{last}={text}"]
    try:  # of its section alone: the flag writes all that it is given as text
        config_flags.DEFINE_config_dict("config", above, flag_values=values, sys_argv=arguments)
        values(arguments)
    except (flags.Error, ValueError, TypeError) as error:
        reason = str(error).partition(": ")[2] or str(error)
        if kind := _KINDS.get(type(above[last])):
            reason = f"give {kind}, as {above[last]}"
        elif isinstance(above[last], tuple):
            texts = text[:1] not in "([" and all(isinstance(v, str) for v in above[last])
            one = f'write --config.{field}="{(text,)}"'
            reason = one if texts else f"give a tuple, as {above[last]}"
        return f"--config.{field}={text}: {reason}"
    return None


def _override_model(config: ml_collections.ConfigDict, name: str) -> str | None:
    """Put the section of `module:factory` in the place of the config's model."""
    section, problems = problems_of(lambda: model_section(name))
    if problems:
        return f"--config.{problems[0]}"
    with config.unlocked():
        del config["model"]
        config.model = section
    return None


def _override_by_mapping(above: ml_collections.ConfigDict, last: str, argument: str) -> str | None:
    """Set a field that takes a name or a mapping, from the text of a mapping (YAML, or JSON)."""
    try:
        above[last] = yaml.safe_load(argument.partition("=")[2])
    except yaml.YAMLError as error:
        return f"{argument}: no mapping: {' '.join(str(error).split())}"
    return None


def fields(config: Mapping[str, Any]) -> list[str]:
    """Every dotted field name of a config."""
    return [name for name, _ in _values(config)]


def _values(
    config: Mapping[str, Any] | ml_collections.ConfigDict, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every field; a section without fields is one."""
    for name, value in config.items():
        if isinstance(value, Mapping | ml_collections.ConfigDict):
            yield from _values(value, f"{prefix}{name}.") if value else [(prefix + name, {})]
        else:
            yield prefix + name, list(value) if isinstance(value, tuple) else value


def listing(config: Mapping[str, Any] | ml_collections.ConfigDict, about: Mapping[str, str]) -> str:
    """Every field of a config: its name, its value there, and what it is.

    Args:
      about: by dotted name; fields that are not named get no text. A section's text stands before
        its first field.
    """
    lines, about = ["Fields, with their values in this config:"], dict(about)
    for name, value in _values(config):
        shown = "unset" if value is None else repr(value) if isinstance(value, str) else str(value)
        sections = [name[: dot.start()] for dot in re.finditer(r"\.", name)]
        heads = {section: f"{section}:" for section in sections if section in about}
        for key, head in {**heads, name: f"{name}={shown}"}.items():
            text, indent = about.pop(key, ""), " " * 6
            lines.append(f"  --config.{head}")
            lines += textwrap.wrap(text, 92, initial_indent=indent, subsequent_indent=indent)
    return "\n".join(lines)
