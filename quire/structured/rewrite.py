"""Rewrites a schema into the keywords that a backend enforces, by cases, complements and enumerations.

What obeys the result obeys the schema. `is_exact` says whether the reverse holds too, apart from the order of
properties. Keywords that no automaton of acceptable size can express are passed to `on_loss`. Knows JSON Schema and
the keywords of the backend; knows no grammar.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from quire.structured.facts import Facts
from quire.structured.instance import TYPES, CheckText, NotCheckedError, resolve, tuple_of
from quire.structured.negate import DEFINITIONS, MAX_POSITIONS, CannotSayError, Negator, all_of, any_of

# What is rewritten; a schema without these is left as it is.
_KEYWORDS = """
    not if then else oneOf contains minContains maxContains uniqueItems propertyNames dependentRequired
    dependentSchemas dependencies unevaluatedProperties unevaluatedItems
"""
REWRITTEN = frozenset(_KEYWORDS.split())
_SAYS_UNIQUE = frozenset({"type", "items", "minItems", "maxItems", "uniqueItems"})
_IN_PLACE = frozenset({"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "dependencies"})

_MAX_CASES = 64  # of one keyword, when it is rewritten
_MAX_PRODUCT = 512  # of the cases of all keywords of one schema, which a backend may have to multiply out
_MAX_SIZE = 5_000  # of the schema that one keyword is rewritten to, in parts
_MAX_ARRAYS = 1_024  # that are listed where items must differ
_MAX_ALL_ARRAYS = 8 * _MAX_ARRAYS
_MAX_OVERLAPS = 4  # of the other alternatives that one of a oneOf has values in common with
_MAX_PAIRS = 2_000  # of alternatives that are compared

OnLoss = Callable[[str, tuple[str, ...], str], None]
Path = tuple[str, ...]


class Rewriter:
    """Rewrites one schema. `on_loss` gets each keyword that cannot be said, its path and the reason; it may raise."""

    def __init__(
        self, root: Any, keywords: frozenset[str], check_text: CheckText, on_loss: OnLoss, is_strict: bool = True
    ) -> None:
        self._root = root
        self._is_strict = is_strict
        self._keywords = keywords
        self._on_loss = on_loss
        self._facts = Facts(root, check_text)
        self._negator = Negator(self._facts, self._say)
        self._is_exact = True
        self._num_pairs = 0
        self._num_arrays = 0

    @property
    def is_exact(self) -> bool:
        """Whether everything that obeys the schema obeys the result, if its properties come in the right order."""
        return self._is_exact and self._negator.is_exact

    def run(self) -> Any:
        """The schema in the backend's keywords."""
        said = self._schema(self._root, ())
        if isinstance(said, dict):
            for path, reference in _references(self._root):
                self._check_reference(reference, path, said)
        return said

    def _check_reference(self, reference: str, path: Path, said: dict[str, Any]) -> None:
        """What was rewritten is no longer where a reference looks for it."""
        try:
            resolve(said, reference)
        except NotCheckedError:
            if reference.startswith("#/"):
                self._on_loss("$ref", path, f"{reference!r:.60} is not among $defs; define it there")
                _put(said, reference)

    def _say(self, schema: Any) -> Any:
        """A part of a condition, whose losses make the whole of it unsayable."""
        self._negator.spend()
        losses: list[str] = []
        on_loss, self._on_loss = self._on_loss, lambda keyword, path, why: losses.append(why)
        try:
            said = self._schema(schema, ())
        finally:
            self._on_loss = on_loss
        if losses:
            raise CannotSayError(losses[0])
        return said

    def _schema(self, schema: Any, path: Path) -> Any:
        if isinstance(schema, bool):
            return schema
        found = {
            keyword: self._value(keyword, value, (*path, keyword))
            for keyword, value in schema.items()
            if keyword not in REWRITTEN
        }
        parts: list[Any] = []
        for keyword, say in _SAYINGS.items():
            if keyword not in schema:
                continue
            try:
                said = say(self, schema, found, path)
                self._add(parts, said, found)
            except CannotSayError as error:
                self._on_loss(keyword, (*path, keyword), str(error))
        if parts:
            found["allOf"] = [*found.get("allOf", ()), *parts]
        return found

    def _value(self, keyword: str, value: Any, path: Path) -> Any:
        if keyword in ("properties", "patternProperties", "$defs", "definitions"):
            return {name: self._schema(part, (*path, name)) for name, part in value.items()}
        if keyword in ("anyOf", "allOf", "prefixItems") or (keyword == "items" and isinstance(value, list)):
            return [self._schema(part, (*path, str(index))) for index, part in enumerate(value)]
        if keyword in ("items", "additionalItems", "additionalProperties"):
            return self._schema(value, path)
        return value

    def _add(self, parts: list[Any], said: Any, found: Mapping[str, Any]) -> None:
        """Add the cases of a keyword, unless there are too many together with the others."""
        if said is True or said == {}:
            return
        if _is_larger(said, _MAX_SIZE):
            raise CannotSayError("it has too many cases")
        if "allOf" not in self._keywords:
            raise CannotSayError("this backend enforces no allOf")
        product = math.prod(_num_cases(part) for part in (*parts, said, *found.get("allOf", ()), found))
        if product > _MAX_PRODUCT:
            raise CannotSayError(f"with the keywords beside it there are {product} cases and more")
        parts.append(said)

    # ---- conditions

    def _not(self, schema: Mapping[str, Any], found: dict[str, Any], path: Path) -> Any:
        return self._negator.negate(schema["not"])

    def _if(self, schema: Mapping[str, Any], found: dict[str, Any], path: Path) -> Any:
        then, otherwise = (schema.get(name, True) for name in ("then", "else"))
        condition = schema["if"]
        yes = all_of([self._say(condition), self._schema(then, (*path, "then"))])
        no = all_of([self._negator.negate(condition), self._schema(otherwise, (*path, "else"))])
        return any_of([yes, no])

    def _one_of(self, schema: Mapping[str, Any], found: dict[str, Any], path: Path) -> Any:
        options = schema["oneOf"]
        said = [self._schema(option, (*path, "oneOf", str(index))) for index, option in enumerate(options)]
        try:
            others = [self._others(options, index) for index in range(len(options))]
            if not any(others) and found.keys() <= DEFINITIONS:
                found["anyOf"] = said
                return True
            exclusive = any_of([all_of([one, *rest]) for one, rest in zip(said, others, strict=True)])
            if _is_larger(exclusive, _MAX_SIZE):
                raise CannotSayError("there are too many of them")
            return exclusive
        except CannotSayError as error:
            if self._is_strict and "oneOf" in self._keywords:
                found["oneOf"] = said  # the backend may see that they exclude each other
                return True
            self._on_loss("oneOf", (*path, "oneOf"), f"the alternatives may overlap, and {error}")
            return any_of(said)

    def _others(self, options: Sequence[Any], index: int) -> list[Any]:
        """What is none of the other alternatives, as far as they overlap with this one."""
        self._num_pairs += len(options)
        if self._num_pairs > _MAX_PAIRS:
            raise CannotSayError("there are too many of them")
        overlapping = [
            other
            for place, other in enumerate(options)
            if place != index and not self._facts.disjoint(options[index], other)
        ]
        if len(overlapping) > _MAX_OVERLAPS:
            raise CannotSayError("there are too many of them")
        return [self._negator.negate(other) for other in overlapping]

    def _dependent_required(self, schema: Mapping[str, Any], found: dict[str, Any], path: Path) -> Any:
        return all_of(
            [
                any_of([_lacks([name]), {"required": [name, *needed]}])
                for name, needed in schema["dependentRequired"].items()
                if needed
            ]
        )

    def _dependent_schemas(self, schema: Mapping[str, Any], found: dict[str, Any], path: Path) -> Any:
        return self._dependencies("dependentSchemas", schema["dependentSchemas"], path)

    def _old_dependencies(self, schema: Mapping[str, Any], found: dict[str, Any], path: Path) -> Any:
        return self._dependencies("dependencies", schema["dependencies"], path)

    def _dependencies(self, keyword: str, entries: Mapping[str, Any], path: Path) -> Any:
        parts = []
        for name, needed in entries.items():
            then = {"required": needed} if isinstance(needed, list) else needed
            said = self._schema(then, (*path, keyword, name))
            parts.append(any_of([_lacks([name]), all_of([{"required": [name]}, said])]))
        return all_of(parts)

    # ---- arrays

    def _contains(self, schema: Mapping[str, Any], found: dict[str, Any], path: Path) -> Any:
        least, most = schema.get("minContains", 1), schema.get("maxContains")
        if least == 0 and most is None:
            return True
        first, rest = tuple_of(schema)
        longest = min(schema.get("maxItems", math.inf), len(first) if rest is False else math.inf)
        positions = int(min(longest, MAX_POSITIONS))
        counts = range(least, least + 1) if most is None else range(least, min(most, positions) + 1)
        while sum(math.comb(positions, count) for count in counts) > _MAX_CASES:
            positions -= 1
        self._is_exact = self._is_exact and positions == longest
        right = self._say(schema["contains"])
        wrong = True if most is None else self._negator.negate(schema["contains"])
        places = itertools.chain.from_iterable(itertools.combinations(range(positions), count) for count in counts)
        cases = [_array_with(right, chosen, wrong) for chosen in places]
        if not cases:
            raise CannotSayError(f"it takes more than {positions} items")
        return any_of(cases)

    def _unique_items(self, schema: Mapping[str, Any], found: dict[str, Any], path: Path) -> Any:
        first, rest = tuple_of(schema)
        longest = min(schema.get("maxItems", math.inf), len(first) if rest is False else math.inf)
        kinds = self._facts.types(schema)
        if "array" not in kinds or longest <= 1:
            return True
        if first:
            pairs = itertools.combinations(first[: int(min(longest, len(first)))], 2)
            if longest <= len(first) and all(self._facts.disjoint(one, other) for one, other in pairs):
                return True
            raise CannotSayError("items at several places may be equal")
        values = self._facts.values(rest)
        if values is None:
            raise CannotSayError("the items may have too many values to list them; give them an enum")
        arrays = self._distinct(values, schema.get("minItems", 0), int(min(longest, len(values))))
        if arrays and kinds == {"array"} and schema.keys() <= _SAYS_UNIQUE:
            found.clear()
            found.update(type="array", enum=arrays)
            return True
        others = [{"type": [name for name in TYPES if name in kinds and name != "array"]}] if len(kinds) > 1 else []
        return any_of([*others, {"enum": arrays}] if arrays else others)

    def _distinct(self, values: Sequence[Any], least: int, most: int) -> list[list[Any]]:
        """Arrays of different values: in every order, or if these are too many in the order of the schema."""
        sizes = range(least, most + 1)
        pick: Callable[[Sequence[Any], int], Iterable[tuple[Any, ...]]] = itertools.permutations
        if sum(math.perm(len(values), size) for size in sizes) > _MAX_ARRAYS:
            self._is_exact = False
            pick = itertools.combinations
            if sum(math.comb(len(values), size) for size in sizes) > _MAX_ARRAYS:
                raise CannotSayError(f"more than {_MAX_ARRAYS} arrays have items that differ; give it maxItems")
        arrays = [list(chosen) for size in sizes for chosen in pick(values, size)]
        self._num_arrays += len(arrays)
        if self._num_arrays > _MAX_ALL_ARRAYS:
            raise CannotSayError("the schema has too many such arrays")
        return arrays

    def _unevaluated_items(self, schema: Mapping[str, Any], found: dict[str, Any], path: Path) -> Any:
        if "items" in schema and not isinstance(schema["items"], list):
            return True
        if schema.keys() & (_IN_PLACE | {"contains", "items"}):
            raise CannotSayError("it depends on which of the schemas beside it hold")
        found["items"] = self._schema(schema["unevaluatedItems"], (*path, "unevaluatedItems"))
        return True

    # ---- objects

    def _unevaluated_properties(self, schema: Mapping[str, Any], found: dict[str, Any], path: Path) -> Any:
        if "additionalProperties" in schema:
            return True
        if schema.keys() & _IN_PLACE:
            raise CannotSayError("it depends on which of the schemas beside it hold")
        said = self._schema(schema["unevaluatedProperties"], (*path, "unevaluatedProperties"))
        found["additionalProperties"] = said
        return True

    def _property_names(self, schema: Mapping[str, Any], found: dict[str, Any], path: Path) -> Any:
        rule = schema["propertyNames"]
        judged = {name: self._facts.is_valid(rule, name) for name in schema.get("properties", {})}
        if any(valid is None for valid in judged.values()):
            raise CannotSayError("it is not known of all properties whether their names obey it")
        bad = _lacks([name for name, valid in judged.items() if not valid])
        if isinstance(rule, bool):
            return True if rule else {"additionalProperties": False}
        excluded = _excluded_names(rule)
        has_patterns = "patternProperties" in schema
        if excluded is not None:
            return _lacks(excluded)
        if schema.get("additionalProperties") is False and not has_patterns:
            return bad
        good: dict[str, Any] = {name: True for name, valid in judged.items() if valid}
        names = self._facts.values(rule)
        if names is not None:
            good |= {name: True for name in names if isinstance(name, str)}
            return {"properties": good, "additionalProperties": False}
        if has_patterns:
            raise CannotSayError("it stands beside patternProperties")
        return {"properties": good, "patternProperties": {_pattern_of(rule): True}, "additionalProperties": False}

    def _min_properties(self, schema: Mapping[str, Any], found: dict[str, Any], path: Path) -> Any:
        return True if "maxProperties" in schema else self._count(schema, found, path)

    def _count(self, schema: Mapping[str, Any], found: dict[str, Any], path: Path) -> Any:
        """Numbers of properties, which backends know only where no property may be left out."""
        properties, required = schema.get("properties", {}), set(schema.get("required", ()))
        optional = [name for name, part in properties.items() if name not in required and part is not False]
        is_open = schema.get("additionalProperties", True) is not False or "patternProperties" in schema
        least, most = schema.get("minProperties", 0), schema.get("maxProperties", math.inf)
        missing = least - len(required)
        if missing > (1 if is_open else 0) + len(optional) and is_open:
            raise CannotSayError("a property that the schema does not name may come twice, which counts once")
        if not optional or (missing == least == 1 and not is_open and most == math.inf):
            return True
        for keyword in ("minProperties", "maxProperties"):
            found.pop(keyword, None)
        if most >= len(required) + len(optional) and not is_open:
            most = math.inf
        if most == math.inf:
            return self._at_least(optional, missing, least) if is_open else _some_of(optional, missing)
        cases: list[Any] = []
        for size in range(int(min(len(optional), most - len(required))) + 1):
            short = missing - size
            if short > (1 if is_open else 0):
                self._is_exact = self._is_exact and not is_open
                continue
            if math.comb(len(optional), size) + len(cases) > _MAX_CASES:
                raise CannotSayError("there are too many ways to choose among the properties")
            bounds = {"maxProperties": int(most)} if is_open else {}
            if short > 0:
                bounds["minProperties"] = least
            cases += [_exactly(chosen, optional, bounds) for chosen in itertools.combinations(optional, size)]
        return any_of(cases)

    def _at_least(self, optional: Sequence[str], missing: int, least: int) -> Any:
        """`missing` of the optional properties, or one less and one that the schema does not name."""
        if missing <= 0:
            return True
        self._is_exact = self._is_exact and missing == 1
        one_less = itertools.combinations(optional, missing - 1)
        if math.comb(len(optional), missing - 1) > _MAX_CASES:
            raise CannotSayError("there are too many ways to choose among the properties")
        others = [_exactly(chosen, optional, {"minProperties": least}) for chosen in one_less]
        return any_of([_some_of(optional, missing), *others])


Say = Callable[[Rewriter, Mapping[str, Any], dict[str, Any], Path], Any]

_SAYINGS: dict[str, Say] = {
    "oneOf": Rewriter._one_of,
    "not": Rewriter._not,
    "if": Rewriter._if,
    "dependentRequired": Rewriter._dependent_required,
    "dependentSchemas": Rewriter._dependent_schemas,
    "dependencies": Rewriter._old_dependencies,
    "contains": Rewriter._contains,
    "uniqueItems": Rewriter._unique_items,
    "unevaluatedItems": Rewriter._unevaluated_items,
    "unevaluatedProperties": Rewriter._unevaluated_properties,
    "propertyNames": Rewriter._property_names,
    "minProperties": Rewriter._min_properties,
    "maxProperties": Rewriter._count,
}


def _references(part: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """All references with their places."""
    for name, value in part.items() if isinstance(part, dict) else enumerate(part):
        if name == "$ref" and isinstance(value, str):
            yield (*path, "$ref"), value
        elif isinstance(value, (dict, list)) and name not in ("enum", "const"):
            yield from _references(value, (*path, str(name)))


def _put(schema: dict[str, Any], reference: str) -> None:
    """Let a reference that has lost its target lead to a schema that says nothing."""
    for part in reference[2:].split("/"):
        schema = schema.setdefault(part.replace("~1", "/").replace("~0", "~"), {})


def _is_larger(schema: Any, limit: int) -> bool:
    """Whether a schema has more parts than that. Parts may be shared, so that it is much larger than it looks."""
    waiting, count = [schema], 0
    while waiting and count <= limit:
        part = waiting.pop()
        count += 1
        if isinstance(part, dict):
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    return count > limit


def _num_cases(schema: Any) -> int:
    """How many schemas without alternatives this one multiplies out to."""
    if isinstance(schema, bool):
        return 1
    alternatives = sum(map(_num_cases, schema["anyOf"])) if "anyOf" in schema else 1
    return alternatives * math.prod(map(_num_cases, schema.get("allOf", ())))


def _lacks(names: Iterable[str]) -> dict[str, Any]:
    """Has none of these properties."""
    absent = dict.fromkeys(names, False)
    return {"properties": absent} if absent else {}


def _exactly(chosen: Sequence[str], optional: Sequence[str], bounds: Mapping[str, int]) -> dict[str, Any]:
    """Of the optional properties these, and no other."""
    return {"required": list(chosen), **_lacks([name for name in optional if name not in chosen]), **bounds}


def _some_of(optional: Sequence[str], count: int) -> Any:
    if count <= 0:
        return True
    if math.comb(len(optional), count) > _MAX_CASES:
        raise CannotSayError("there are too many ways to choose among the properties")
    return any_of([{"required": list(chosen)} for chosen in itertools.combinations(optional, count)])


def _array_with(right: Any, chosen: Sequence[int], wrong: Any) -> Any:
    """An array with a right item at the chosen places and a wrong one at all others."""
    if not chosen:
        return {"items": wrong}
    first = [right if index in chosen else wrong for index in range(chosen[-1] + 1)]
    rest = {} if wrong is True else {"items": wrong}
    return {"prefixItems": first, "minItems": len(first), **rest}


def _excluded_names(rule: Mapping[str, Any]) -> list[str] | None:
    """The names that a rule excludes, if that is all it does."""
    inner = rule.get("not")
    if rule.keys() - {"type"} != {"not"} or rule.get("type", "string") != "string" or not isinstance(inner, dict):
        return None
    if inner.keys() == {"const"}:
        return [name for name in (inner["const"],) if isinstance(name, str)]
    return [name for name in inner["enum"] if isinstance(name, str)] if inner.keys() == {"enum"} else None


def _pattern_of(rule: Mapping[str, Any]) -> str:
    """A regular expression for the names that obey a rule."""
    if rule.get("type", "string") == "string":
        keywords = rule.keys() - {"type"}
        if keywords == {"pattern"}:
            return str(rule["pattern"])
        if keywords and keywords <= {"minLength", "maxLength"}:
            return f"^(?s:.{{{rule.get('minLength', 0)},{rule.get('maxLength', '')}}})$"
    raise CannotSayError("it is more than an enum, a pattern or a length")
