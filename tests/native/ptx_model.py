"""The PTX memory model by enumeration: which outcomes of a small program its axioms allow.

Axioms and definitions: "Memory Consistency Model" of the PTX ISA, and Lustig, Sahasrabuddhe,
Giroux: A Formal Analysis of the NVIDIA PTX Memory Consistency Model (ASPLOS 2019).  Left out are
proxies, accesses of different sizes, and dependencies other than those that `vote` states, which
only makes more outcomes allowed.

A program is {thread: instructions}, one a line:

    st.weak word 1              ld.acquire.sys word -> register      fence.sc.gpu
    st.release.gpu word 1       atom.acq_rel.gpu word 1 -> register
    bar name                    orders the threads that name it, like bar.sync and bar.warp.sync
    vote name                   what follows depends on the loads before it; orders no memory

Threads named "b<block>.<thread>" run on one GPU; every other thread runs outside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

Program = Mapping[str, str]
Outcome = Callable[[dict[str, int]], bool]
Pairs = set[tuple[int, int]]


@dataclass(frozen=True)
class Event:
    """kind: R, W, F (fence), B (barrier) or V (vote).  word: or the barrier's name."""

    number: int
    thread: str
    kind: str
    order: str = "weak"
    scope: str = ""
    word: str = ""
    value: int = 0
    register: str = ""

    @property
    def is_strong(self) -> bool:
        return self.kind == "F" or (self.kind in "RW" and self.order != "weak")

    def reaches(self, thread: str) -> bool:
        """Whether the scope includes a thread."""
        if self.scope == "sys" or self.thread == thread:
            return True
        mine, other = self.thread.split(".")[0], thread.split(".")[0]
        if self.scope == "gpu":
            return mine.startswith("b") and other.startswith("b")
        return self.scope == "cta" and mine == other


@dataclass(frozen=True)
class Execution:
    """Events with what does not depend on the values that loads find."""

    events: list[Event]
    po: Pairs
    rmw: Pairs
    first: int  # events below are the initial values

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]


def compose(left: Pairs, right: Pairs) -> Pairs:
    after: dict[int, list[int]] = {}
    for a, b in right:
        after.setdefault(a, []).append(b)
    return {(a, c) for a, b in left for c in after.get(b, ())}


def closure(pairs: Pairs) -> Pairs:
    found = set(pairs)
    while (more := found | compose(found, found)) != found:  # bounded by the pairs there are
        found = more
    return found


def is_acyclic(pairs: Pairs) -> bool:
    return all(a != b for a, b in closure(pairs))


def parse(program: Program, initial: Mapping[str, int]) -> Execution:
    events = [Event(i, "init", "W", word=w, value=v) for i, (w, v) in enumerate(initial.items())]
    first, po, rmw = len(events), set(), set()
    for thread, text in program.items():
        mine: list[Event] = []
        for line in filter(None, map(str.strip, text.splitlines())):
            made = _events_of(line, thread, len(events))
            po |= {(a.number, b.number) for a in mine for b in made}
            if len(made) == 2:
                rmw.add((made[0].number, made[1].number))
                po |= rmw
            mine += made
            events += made
    return Execution(events, po, rmw, first)


def _events_of(line: str, thread: str, number: int) -> list[Event]:
    words = line.replace("->", " ").split()
    name, *rest = words[0].split(".")
    order, scope = [*rest, "", ""][:2]
    if name in ("bar", "vote"):
        return [Event(number, thread, name[0].upper(), word=words[1])]
    if name == "fence":
        return [Event(number, thread, "F", order, scope)]
    if name == "st":
        return [Event(number, thread, "W", order, scope, words[1], int(words[2]))]
    if name == "ld":
        return [Event(number, thread, "R", order, scope, words[1], register=words[2])]
    assert name == "atom", f"{line}: an instruction that the model does not know"
    acquires = "acquire" if order in ("acquire", "acq_rel") else "relaxed"
    releases = "release" if order in ("release", "acq_rel") else "relaxed"
    return [
        Event(number, thread, "R", acquires, scope, words[1], register=words[3]),
        Event(number + 1, thread, "W", releases, scope, words[1], int(words[2])),
    ]


def morally_strong(x: Execution) -> Pairs:
    def related(a: Event, b: Event) -> bool:
        if a is b or "init" in (a.thread, b.thread):
            return False
        if a.kind in "RW" and b.kind in "RW" and a.word != b.word:
            return False
        if a.thread == b.thread:
            return True
        return a.is_strong and b.is_strong and a.reaches(b.thread) and b.reaches(a.thread)

    known = [event for event in x.events if event.kind in "RWF"]
    return {(a.number, b.number) for a in known for b in known if related(a, b)}


class Model:
    """The relations of one program; `outcomes` looks for an execution that the axioms allow."""

    def __init__(self, x: Execution) -> None:
        self.x = x
        self.strong = morally_strong(x)
        same = self._same_word(x.po)
        ident = {(e.number, e.number) for e in x.events}
        self.po_or_same = x.po | ident
        self.po_word = same
        strong_w = {e.number for e in x.of("W") if e.is_strong}
        strong_r = {e.number for e in x.of("R") if e.is_strong}
        released = {e.number for e in x.of("W") if e.order == "release"}
        acquired = {e.number for e in x.of("R") if e.order == "acquire"}
        fences = {e.number for e in x.of("F")}
        near = same | ident
        self.releases = {(a, b) for a, b in near if a in released and b in strong_w}
        self.releases |= {(a, b) for a, b in x.po if a in fences and b in strong_w}
        self.acquires = {(a, b) for a, b in near if a in strong_r and b in acquired}
        self.acquires |= {(a, b) for a, b in x.po if a in strong_r and b in fences}
        self.barriers = self._meetings("B")
        self.depends = self._dependencies()

    def _same_word(self, pairs: Pairs) -> Pairs:
        events = self.x.events
        return {
            (a, b)
            for a, b in pairs
            if events[a].kind in "RW"
            and events[b].kind in "RW"
            and events[a].word == events[b].word
        }

    def _meetings(self, kind: str) -> Pairs:
        met = self.x.of(kind)
        return {(a.number, b.number) for a in met for b in met if a.word == b.word and a is not b}

    def _dependencies(self) -> Pairs:
        votes = self._meetings("V") | {(v.number, v.number) for v in self.x.of("V")}
        reads = {e.number for e in self.x.of("R")}
        writes = {e.number for e in self.x.of("W")}
        found = compose(compose(self.x.po, votes), self.x.po)
        return {(a, b) for a, b in found if a in reads and b in writes}

    def allows(self, outcome: Outcome) -> bool:
        """outcome: of registers, and of each word's last value where one write comes last."""
        return any(
            outcome(values) and self._is_possible(rf, co)
            for rf, registers in self._reads()
            for co in self._coherences()
            for values in [registers | self._last(co)]
        )

    def _reads(self) -> Iterator[tuple[Pairs, dict[str, int]]]:
        loads, stores = self.x.of("R"), self.x.of("W")
        candidates = [[w for w in stores if w.word == r.word] for r in loads]
        for chosen in itertools.product(*candidates):
            rf = {(w.number, r.number) for w, r in zip(chosen, loads, strict=True)}
            yield rf, {r.register: w.value for w, r in zip(chosen, loads, strict=True)}

    def _coherences(self) -> Iterator[Pairs]:
        """Coherence is a partial order: only morally strong writes have to be in it."""
        stores = [w for w in self.x.of("W") if w.number >= self.x.first]
        pairs = [(a, b) for a, b in itertools.combinations(stores, 2) if a.word == b.word]
        fixed = {
            (i.number, w.number)
            for i in self.x.events[: self.x.first]
            for w in stores
            if w.word == i.word
        }
        choices: list[list[Pairs]] = []
        for a, b in pairs:
            here, there = (a.number, b.number), (b.number, a.number)
            if a.thread == b.thread:
                choices.append([{here}])
            elif here in self.strong:
                choices.append([{here}, {there}])
            else:
                choices.append([{here}, {there}, set()])
        for chosen in itertools.product(*choices):
            co = fixed.union(*chosen)
            if closure(co) == co and is_acyclic(co):
                yield co

    def _last(self, co: Pairs) -> dict[str, int]:
        last: dict[str, int] = {}
        for word in {w.word for w in self.x.of("W")}:
            stores = [w for w in self.x.of("W") if w.word == word]
            ends = [w for w in stores if not any((w.number, o.number) in co for o in stores)]
            if len(ends) == 1:
                last[word] = ends[0].value
        return last

    def _is_possible(self, rf: Pairs, co: Pairs) -> bool:
        x, strong = self.x, self.strong
        fr = {(r, later) for w, r in rf for earlier, later in co if earlier == w}
        if not is_acyclic((strong & (rf | co | fr)) | self.po_word):  # SC per location
            return False
        if compose(strong & fr, strong & co) & x.rmw:  # atomicity
            return False
        if not is_acyclic(rf | self.depends):  # no thin air
            return False
        seen = strong & rf
        observed = closure(compose(seen, x.rmw))
        observation = seen | compose(observed, seen)
        synchronised = strong & compose(compose(self.releases, observation), self.acquires)
        return any(
            self._is_causal(rf, fr, co, observation, synchronised, sc)
            for sc in self._fence_orders()
        )

    def _fence_orders(self) -> Iterator[Pairs]:
        fences = [f for f in self.x.of("F") if f.order == "sc"]
        pairs = [
            (a.number, b.number)
            for a, b in itertools.combinations(fences, 2)
            if (a.number, b.number) in self.strong
        ]
        for ways in itertools.product((False, True), repeat=len(pairs)):
            order = {
                (b, a) if turned else (a, b) for (a, b), turned in zip(pairs, ways, strict=True)
            }
            if is_acyclic(order):
                yield order

    def _is_causal(
        self, rf: Pairs, fr: Pairs, co: Pairs, observation: Pairs, synchronised: Pairs, sc: Pairs
    ) -> bool:
        steps = synchronised | self.barriers | sc
        base = closure(compose(compose(self.po_or_same, steps), self.po_or_same))
        cause = base | compose(observation, base | self.po_word)
        stores = {w.number for w in self.x.of("W")}
        ordered = {(a, b) for a, b in self._same_word(cause) if {a, b} <= stores}
        if ordered - co:  # coherence
            return False
        if any((b, a) in cause for a, b in sc):  # Fence-SC
            return False
        return all(a != b for a, b in compose(rf | fr, cause))  # causality


def is_allowed(
    program: Program, outcome: Outcome, initial: Mapping[str, int] | None = None
) -> bool:
    """Whether some execution ends in an outcome.  initial: of words; the others begin at 0."""
    x = parse(program, {})
    words = {event.word for event in x.events if event.kind in "RW"}
    return Model(parse(program, dict.fromkeys(sorted(words), 0) | dict(initial or {}))).allows(
        outcome
    )
