"""Statement tests use an answer in another sandbox as if it were local, and the answer cannot read the tests."""

from __future__ import annotations

import pytest

from operators.score.verifiers import code

pytestmark = pytest.mark.usefixtures("confined")

PASSES: dict[str, tuple[str, str]] = {
    "plain values": (
        "def same(x): return x",
        """
import collections, datetime, decimal, fractions
for value in (None, True, 0, -1, 10**30, 10**6000, 1.5, float('inf'), 2j, 'ü\\ud800', b'\\0', (), (1, (2,)), [[]],
              {1: [2]}, {(1, 2): {3}}, {1, 2}, frozenset({1}), bytearray(b'x'), range(3), slice(1, None), ..., int,
              ValueError,
              collections.Counter('aab'), collections.deque([1, 2], 2), collections.OrderedDict(a=1),
              datetime.date(2020, 1, 2), datetime.datetime(2020, 1, 2, 3), datetime.timedelta(1, 2, 3),
              decimal.Decimal('1.10'), fractions.Fraction(1, 3)):
    got = same(value)
    assert got == value and type(got) is type(value), value
assert same(float('nan')) != same(float('nan')) and same(collections.deque([1], 5)).maxlen == 5
assert same(collections.defaultdict(list))[7] == []
""",
    ),
    "arguments that are changed": (
        "def sort(x): x.sort()\ndef deep(d): d['a'][0].append(9); d['b'] = d['a']\n"
        "def clear(s, b): s.clear(); b.extend(b'x')",
        "x = [3, 1, 2]\nsort(x)\nassert x == [1, 2, 3]\ninner = [1]\nd = {'a': [inner]}\ndeep(d)\n"
        "assert inner == [1, 9] and d['b'] is d['a']\ns, b = {1}, bytearray()\nclear(s, b)\n"
        "assert (s, b) == (set(), b'x')",
    ),
    "cycles": (
        "def loop(x): x.append(x); return x",
        "x = []\ny = loop(x)\nassert y is x and x[0] is x",
    ),
    "objects": (
        """
class Stack:
    made = 0
    def __init__(self): self.items = []; Stack.made += 1
    def push(self, *items, twice=False): self.items += items * (1 + twice); return self
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, index): return self.items[index]
    def __enter__(self): return self
    def __exit__(self, *error): self.items.clear()
    def __repr__(self): return f'Stack({self.items})'
""",
        """
s = Stack()
assert s.push(1, 2).push(3, twice=True) is s and len(s) == 4 and list(s) == [1, 2, 3, 3] and 2 in s and s[0] == 1
assert s.pop() == 3 and isinstance(s, Stack) and not isinstance(1, Stack) and repr(s) == 'Stack([1, 2, 3])' and s
with s as inside: assert inside.items == [1, 2, 3]
assert s.items == [] and Stack.made == 1 and not hasattr(s, 'nothing')
s.colour = 'red'
assert s.colour == 'red'
""",
    ),
    "operators": (
        """
from dataclasses import dataclass
@dataclass(frozen=True, order=True)
class V:
    x: int
    y: int = 0
    def __add__(self, other): return V(self.x + other.x, self.y + other.y)
    def __mul__(self, k): return V(self.x * k, self.y * k)
    __rmul__ = __mul__
    def __neg__(self): return V(-self.x, -self.y)
    def __abs__(self): return (self.x**2 + self.y**2) ** 0.5
""",
        "assert V(1, 2) + V(3, 4) == V(4, 6) and 2 * V(1) * 3 == V(6) and -V(1) == V(-1) and abs(V(3, 4)) == 5.0\n"
        "assert V(1) < V(2) and V(1) != V(2) and {V(1): 'a'}[V(1)] == 'a' and len({V(1), V(1)}) == 1\n"
        "assert sorted([V(3), V(1)]) == [V(1), V(3)] and V(1, 2).y == 2 and f'{V(1)}' == 'V(x=1, y=0)'",
    ),
    "kinds of plain values": (
        "from collections import namedtuple\nfrom enum import IntEnum\nPoint = namedtuple('Point', 'x y')\n"
        "Colour = IntEnum('Colour', 'RED GREEN')\ndef point(): return Point(1, 2)",
        "assert point() == (1, 2) and point().x == 1 and Colour.GREEN == 2 and Colour.RED < 2 and point() != (1, 3)\n"
        "x, y = point()\nassert (x, y) == (1, 2)",
    ),
    "errors": (
        """
class Empty(LookupError):
    def __init__(self, what, code): super().__init__(what); self.code = code
def take(n):
    if n < 0: raise ValueError('negative')
    raise Empty('nothing', 7)
""",
        """
for n, kind in ((-1, ValueError), (1, Empty), (1, LookupError)):
    try: take(n)
    except kind as error: assert error.args in (('negative',), ('nothing',))
    else: assert False
try: take(1)
except Empty as error: assert error.code == 7 and str(error) == 'nothing'
""",
    ),
    "functions of the test": (
        "def apply(f, *x): return [f(each) for each in x]\ndef ordered(x, key): return sorted(x, key=key)\n"
        "def retry(f):\n  try: return f()\n  except KeyError as error: return error.args",
        "seen = []\nassert apply(lambda x: x + 1, 1, 2) == [2, 3] and apply(seen.append, 5) == [None]\n"
        "assert ordered(['bb', 'a'], len) == ['a', 'bb'] and ordered([2, 1], lambda x: -x) == [2, 1]\n"
        "assert retry(lambda: {}['k']) == ('k',) and apply(str, 1) == ['1'] and apply(iter([7]).__next__) == []",
    ),
    "objects of the test": (
        "def total(node):\n  n = 0\n  while node: n += node.value; node = node.next\n  return n\n"
        "def turn(node):\n  last = None\n  while node: node.next, last, node = last, node, node.next\n  return last",
        "class Node:\n  def __init__(self, value, next=None): self.value, self.next = value, next\n"
        "chain = Node(1, Node(2, Node(3)))\nassert total(chain) == 6\nlast = turn(chain)\n"
        "assert last.value == 3 and last.next.next is chain and total(last) == 6",
    ),
    "generators": (
        "def count(n):\n  for i in range(n): got = yield i\ndef total(items): return sum(items)",
        "assert list(count(3)) == [0, 1, 2]\ng = count(2)\nassert next(g) == 0 and next(g) == 1\n"
        "assert next(g, 'end') == 'end' and total(i for i in range(4)) == 6 and total(iter([1])) == 1",
    ),
    "coroutines": (
        "import asyncio\nasync def later(x): await asyncio.sleep(0); return x",
        "import asyncio\nassert asyncio.run(later(3)) == 3\n"
        "async def both(): return await asyncio.gather(later(1), later(2))\nassert asyncio.run(both()) == [1, 2]",
    ),
    "a function that checks": (
        "def add(a, b): return a + b",
        "def check(candidate):\n  assert candidate(1, 2) == 3\n  assert candidate(a='a', b='b') == 'ab'\ncheck(add)",
    ),
    "names and modules": (
        "import math\nfrom collections import Counter\nimport math as m\nn = 0\n"
        "def up():\n  global n, late\n  n += 1; late = n",
        "assert math.isclose(math.pi, 3.14159, abs_tol=1e-4) and m is math and Counter('aa')['a'] == 2\n"
        "assert n == 0\nup()\n"
        "assert n == 1 and late == 1 and max(1, 2) == 2 and __name__ == '__main__'",
    ),
    "a function with the name of a built-in one": (
        "def sum(a, b): return a + b",
        "assert sum(1, 2) == 3\ndef check(candidate):\n  n = len('ab')\n  assert candidate(n, 3) == 5\ncheck(sum)",
    ),
    "numbers of a test and classes of an answer": (
        "from enum import IntEnum\nColour = IntEnum('Colour', 'RED GREEN')\n"
        "class F(float):\n  pass\n"
        "class M:\n  def __init__(self, *x): self.x = list(x)\n"
        "  def __mul__(self, k): return M(*(k * a for a in self.x))\n"
        "  def __matmul__(self, o): return sum(a * b for a, b in zip(self.x, o.x))\n"
        "  def __getitem__(self, i): return self.x[i]\n  def __float__(self): return float(self.x[0])",
        "assert Colour.RED + 1 == 2 and 3 - Colour.GREEN == 1 and abs(F(4) - 4) < 1e-9 and abs(F(4) - 5) == 1\n"
        "m = M(1, 2)\nassert list(m * 2) == [2, 4] and (m * 3)[1] == 6 and m @ m == 5 and m @ (m * 2) == 10",
    ),
    "arrays": (
        "import numpy as np\ndef double(x): return np.asarray(x) * 2\ndef mean(x): return np.mean(x)",
        "import numpy\nassert (double(numpy.array([1, 2])) == numpy.array([2, 4])).all() and mean([1, 2]) == 1.5\n"
        "assert double([[1.5]]).shape == (1, 1)",
    ),
}  # fmt: skip

TOKEN = "TOKEN-8c1f"
SECRET = f"assert find(41) == {TOKEN!r}"
ATTACKS: dict[str, tuple[str, str]] = {
    "equal to everything": (
        "class E:\n  __eq__ = lambda s, o: True\n  __ne__ = lambda s, o: False\n  __hash__ = lambda s: 0\n"
        "def find(x): return E()",
        SECRET,
    ),
    "a text that is equal to everything": (
        "class E(str):\n  __eq__ = lambda s, o: True\n  __hash__ = lambda s: 0\ndef find(x): return E('x')",
        SECRET,
    ),
    "greater than everything": (
        "class E(int):\n  __gt__ = __ge__ = __lt__ = __le__ = lambda s, o: True\ndef find(x): return E()",
        "assert 0.5 < find(1)",
    ),
    "differs from nothing": (
        "class E:\n  __sub__ = __rsub__ = __mul__ = __add__ = lambda s, o: 0.0\ndef find(x): return E()",
        "assert abs(find(1) - 4.0) < 1e-6",
    ),
    "a number that differs from nothing": (
        "class E(float):\n  __sub__ = __rsub__ = lambda s, o: E()\ndef find(x): return E(7)",
        "assert abs(4.0 - find(1)) < 1e-6",
    ),
    "a difference without size": (
        "class F(float):\n  pass\n"
        "class E:\n  __sub__ = __rsub__ = __mul__ = __pow__ = __neg__ = lambda s, *o: E()\n"
        "  __bool__ = lambda s: False\n"
        "  __abs__ = __float__ = lambda s: F(0)\n  __int__ = lambda s: 0\n  __round__ = lambda s, *o: 0.0\n"
        "  __rmul__ = __radd__ = lambda s, o: 0.0\ndef find(x): return E()",
        "import math\npassed = 0\nfor check in (\n"
        "    lambda d: abs(d) < 1, lambda d: d**2 < 1, lambda d: d * d < 1, lambda d: not d, lambda d: abs(-d) < 1,\n"
        "    lambda d: math.fabs(d) < 1, lambda d: int(d) == 0, lambda d: round(d, 3) == 0, lambda d: sum([d]) < 1):\n"
        "  try: passed += check(find(1) - 4.0)\n  except TypeError: pass\n"
        "assert passed",
    ),
    "no difference of arrays": (
        "class E:\n  __sub__ = __rsub__ = lambda s, o: E()\n  __len__ = lambda s: 1\n"
        "  __getitem__ = lambda s, i: [0.0][i]\n  __array__ = lambda s, *a, **k: __import__('numpy').zeros(1)\n"
        "def find(x): return E()",
        "import numpy as np\npassed = 0\nfor other in (4.0, np.array([4.0]), np.float64(4.0)):\n"
        "  for check in (lambda: np.abs(find(1) - other), lambda: np.abs(other - find(1))):\n"
        "    try: passed += bool((check() < 1e-6).all())\n    except TypeError: pass\nassert passed",
    ),
    "no difference of sets": (
        "class E:\n  __sub__ = __xor__ = lambda s, o: set()\ndef find(x): return E()",
        "assert not find(1) ^ {1, 2}",
    ),
    "another abs": ("def abs(x): return 0\ndef find(x): return 7", "assert abs(find(1) - 4.0) < 1e-6"),
    "another all": ("def all(x): return True\ndef find(x): return 7", "assert all(find(x) == x for x in (1, 2))"),
    "another isinstance": (
        "def isinstance(*a): return True\ndef find(x): return 7",
        "def check(find):\n  assert isinstance(find(1), str)\ncheck(find)",
    ),
    "another error": (
        "ValueError = AssertionError\ndef find(x): return 7",
        "try:\n  find(1)\n  assert False\nexcept ValueError: pass",
    ),
    "contains everything": (
        "class E:\n  __contains__ = lambda s, o: True\n  __iter__ = lambda s: iter(())\ndef find(x): return E()",
        f"assert {TOKEN!r} in find(1)",
    ),
    "frames": (
        "import sys\ndef find(x):\n  f = sys._getframe()\n  while f:\n"
        "    t = repr(f.f_locals) + repr(f.f_code.co_consts)\n"
        "    if 'TOKEN' + '-' in t: return t[t.index('TOKEN' + '-'):][:10]\n    f = f.f_back",
        SECRET,
    ),
    "all objects": (
        "import gc\ndef find(x):\n  for each in gc.get_objects():\n    for part in gc.get_referents(each):\n"
        "      if type(part) is str and 'TOKEN' + '-' in part: return part[part.index('TOKEN' + '-'):][:10]",
        SECRET,
    ),
    "messages": (
        "import laminar_remote as r\nseen = []\nreceive = r.RemotePeer._receive\n"
        "def receiving(self):\n  m = receive(self); seen.append(repr(m)); return m\nr.RemotePeer._receive = receiving\n"
        "def find(x):\n  for each in seen:\n    if 'TOKEN' + '-' in each: return each[each.index('TOKEN' + '-'):][:10]",
        SECRET + "\n" + SECRET,
    ),
    "code of a function": (
        "def find(f):\n  for each in f.__code__.co_consts + f.__defaults__:\n"
        "    if 'TOKEN' + '-' in str(each): return each",
        f"def known(x={TOKEN!r}): return {TOKEN!r}\nassert find(known) == {TOKEN!r}",
    ),
    "class of an object": (
        "def find(o):\n  for name in ('_secret', '__class__', '__dict__', '__init__'):\n"
        "    try: return getattr(o, name)['_secret']\n    except Exception: pass\n  return o._secret",
        f"class O:\n  def __init__(self): self._secret = {TOKEN!r}\nassert find(O()) == {TOKEN!r}",
    ),
    "a module that is none": (
        "import laminar_remote as r\nr.RemotePeer._refer = lambda self, value: ['module', 'os']\nfind = object()",
        "find.system\nassert True",
    ),
    "a function of the test's program": (
        "import laminar_remote as r\nr.RemotePeer._refer = lambda self, value: ['type', 'exec']\ndef find(x): return 1",
        "find('raise SystemExit')\nassert True",
    ),
    "an end that looks like an error": (
        "import os\ndef find(x): os._exit(0)",
        "caught = False\ntry: find(1)\nexcept Exception: caught = True\nassert caught",
    ),
    "an end, whatever is caught": ("import os\ndef find(x): os._exit(0)", "try: find(1)\nexcept BaseException: pass"),
    "an end before": ("raise SystemExit(0)", "assert True"),
    "noise in the stream": ("import os\nos.write(3, b'\\0\\0\\0\\x02{}')\ndef find(x): return 1", "assert True"),
    "a long message": ("import os\nos.write(3, b'\\xff' * 4)\ndef find(x): return 1", "assert True"),
    "no stream": ("import os\nos.close(3)\ndef find(x): return 1", "assert True"),
    "reports": ("import os\nfor n in range(64):\n  try: os.write(n, b'+')\n  except OSError: pass", SECRET),
    "patched builtins": (
        "import builtins\nbuiltins.AssertionError = builtins.print\ndef find(x): return None",
        SECRET,
    ),
    "no end": ("def find(x):\n  while True: pass", SECRET),
    "endless items": ("def find(x):\n  while True: yield 1", "list(find(1))"),
    "much memory": ("def find(x): return 'x' * 10**9", "find(1)"),
    "deep nesting": (
        "import os, struct\nb = b'[' * 10**6\nos.write(3, struct.pack('>I', len(b)) + b)",
        "assert True",
    ),
}


@pytest.mark.parametrize("name", PASSES)
def test_statements_use_an_answer_like_a_local_program(name: str) -> None:
    answer, test = PASSES[name]
    assert code.verify(answer, {"tests": [test]}, 30.0, 512) == 1.0, name
    assert code.verify(answer, {"tests": [test + "\nassert False"]}, 30.0, 512) == 0.0


def test_statements_share_variables_and_count_separately() -> None:
    tests = ["x = one()", "assert x == 1", "assert x == 2", "assert one() == x"]
    assert code.verify("def one(): return 1", {"tests": tests}, 30.0, 512, partial=True) == 0.75


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_on_statements_score_zero(name: str) -> None:
    answer, test = ATTACKS[name]
    seconds = 0.5 if name.startswith(("no end", "endless")) else 20.0
    assert code.verify(answer, {"tests": [test]}, seconds, 512) == 0.0
