"""What grades the answers to reasoning_gym's tasks: its own scorer where it was read, a grader of ours, or nothing.

Some of its scorers ``eval`` the answer or hand it to sympy's parser, which does; a run on such a task runs what a model
writes. So each scorer was read, with what it calls: whether it executes text, imports, opens or starts anything. The
digest says which source was read; a scorer of another release is refused until it was read.

Owns: that list. Never: grades (workers/scoring/graders.py). Invariant: a task that is on neither list has no verifier.
"""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path

OURS = frozenset(
    {
        "binary_matrix",
        "bitwise_arithmetic",
        "countdown",
        "game_of_life_halting",
        "intermediate_integration",
        "n_queens",
        "number_sorting",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
"""Their scorers execute the answer or the entry that comes with it (one takes every answer for "True"); ours, in
workers/scoring/graders.py, do not."""

REFUSED = {"composite": "it hands the answer to the scorer of another task; name that task"}
"""Tasks whose scorers are not run here -> why."""

_READ = """
ab a232e9cbf1cc7fb20f913cca845504d8 algorithmic/ab
acre d7ae3951eee9bbcce0012274f7673d1d induction/acre/acre dataset
advanced_geometry 0a914f1a4095cf7d25e0bb2ba19d1e86 geometry/advanced_geometry
aiw 753ddc94e6de60c65bfba1b07a491554 logic/aiw dataset
arc_1d 86447050db85fe9c65e54d9a6d549c29 arc/arc_1d dataset
arc_agi 7636ffc5097b52acaafa1d8317d8353b arc/arc_agi arc/board_format
base_conversion bda3c3be78649709805e7a73a772c398 algorithmic/base_conversion dataset
basic_arithmetic 8235476c3a9a6029b082dc16cc6636c6 arithmetic/basic_arithmetic dataset
bf ac314b8d802ffce4fbbfef3490ef9b3d code/bf dataset
binary_alternation 3697ce36cfaf381c8b859674355f5656 algorithmic/binary_alternation dataset
boxnet 358d0f7d3fd245b4f7606a9397fd9311 games/boxnet
caesar_cipher 277603a86ec8245aa4194269c06ce84d algorithmic/caesar_cipher dataset
calendar_arithmetic ad06cec5be9c14889c4860482218aecb arithmetic/calendar_arithmetic
chain_sum 1a54bddd96e5b36a772e03a28a9b5ff9 arithmetic/chain_sum utils
circuit_logic 04858f961e50c87f16aab89e2f83b000 logic/circuit_logic
codeio 63cd829768bf4fabc77a22307ae74e6d code/codeio zss/*
coin_flip a6e6ebe348bdd289bbf06bfe9360e4e1 probability/coin_flip
color_cube_rotation 0ea2f095bedd12372096fde20a06b501 cognition/color_cube_rotation
complex_arithmetic 32beb8f40a25aa781b96f6293f11bd4d algebra/complex_arithmetic
count_bits be07953aa6976dce14a1e5bf5beed46a arithmetic/count_bits dataset
count_primes 09288d409696a2aabca910003de8550f algorithmic/count_primes dataset
course_schedule 52825c3b075dc749933eee470d773035 graphs/course_schedule dataset
cryptarithm 9dfd7012e4fda20c15e62559b7a508d2 algorithmic/cryptarithm
decimal_arithmetic e56416e0c10bb55f46961e93ef55826f arithmetic/decimal_arithmetic
decimal_chain_sum 1a4b13aceb3fc50dce3921f109b9d5b0 arithmetic/decimal_chain_sum
dice 3b8f83d04f01b13526e2790245c09a52 arithmetic/dice
emoji_mystery 6345fd95cc54e614e3b92e9cc82f96b8 games/emoji_mystery
family_relationships b00459b1242416befddbb4c0bb6880d0 graphs/family_relationships
figlet_font a39ae5e48acca9018a8d2d13d3e2543f cognition/figlet_fonts
fraction_simplification 54a6641f90029f4c2a396e577d62ba95 arithmetic/fraction_simplification
futoshiki 1e17d801b9695f35d04047bde037beae games/futoshiki
game_of_life 0cd5e37e542f2e956efcefb898ec84f4 algorithmic/game_of_life
gcd 75c7f6d8425632f24d59d7691369430a arithmetic/gcd dataset
graph_color b89db0e352de50fe841f7126904dfff1 algorithmic/graph_color
group_anagrams 85c3fe62b293f423b9c3c404afcfba53 algorithmic/group_anagrams
gsm_symbolic 511e30a979511719c65019082ea298e2 arithmetic/gsm_symbolic/gsm_symbolic
isomorphic_strings 1ad0005eb5c929ea62607dc62d24fdad algorithmic/isomorphic_strings dataset
jugs 9a14c33afbb2fcf0b182d80a2c300ef6 algorithmic/jugs
kakurasu 32952922a3c863ba14acc2773230e18e games/kakurasu
knight_swap a9de444d885125e0e6d42de9c34a705c games/knight_swap
knights_knaves 8837a3c6dfc72bb40db168b82ad6b3da logic/knights_knaves
largest_island e30573963a253cf7d18735571966ac6f graphs/largest_island dataset
lcm d04d1ed3c21e926ee9745ff6afd01727 arithmetic/lcm dataset
leg_counting 275def3d4d7b6bc9c7b2843c3f871777 arithmetic/leg_counting dataset
letter_counting 615fb26e6a36f6cb5690ec88d737130f algorithmic/letter_counting dataset
letter_jumble 1fc2b12a373460c72d9b5e0b31bd4f79 algorithmic/letter_jumble
list_functions a2bf4e50bf563117378e56364a608254 induction/list_functions/list_functions dataset
mahjong_puzzle eef52353a8ae65c4e61bb6d3fabdef3b games/mahjong dataset
manipulate_matrix 7203c8ad02bb74fe52a91b88a9fcaca1 algorithmic/manipulate_matrix
maze bb8488c0e348c5fcb21693d9306180e7 games/maze dataset
mini_sudoku 20b77f97b1f5a9aa364940311d6647c4 games/mini_sudoku
modulo_grid f62f56a24e0448801a25b59f6e0cd3b0 cognition/modulo_grid dataset
needle_haystack c9f3c04bdff4b288a4265fdfacb1e7bc cognition/needle_haystack
number_filtering 3b34eee3f74cbb41a1cee0807223c3e6 algorithmic/number_filtering dataset
number_format a30fb4f8086eff3a9fbc481e2dd423fa arithmetic/number_format
number_sequence 38e630f26ae2bdd602c0ecd451f15a95 cognition/number_sequences dataset
palindrome_generation 6823b3787d901f0135c6483546b416d4 algorithmic/palindrome_generation
palindrome_partitioning a1c218cdd2bb9e90a692be8bf7877a3b algorithmic/palindrome_partitioning
path_star ae55353009956240c0eacb5033753494 graphs/path_star
polynomial_equations d41b84e2daf73105922c4211d8a49307 algebra/polynomial_equations
pool_matrix 36b24a7835769b132a22190f6477002b algorithmic/pool_matrix
power_function fd820443cce4f23ac04de5c6cded9899 arithmetic/power_function
prime_factorization 30f0822f1143c58e41f96f1bf400c91f arithmetic/prime_factorization
products b85de8a6b21845ef08043a92546d1d37 arithmetic/products utils
propositional_logic 8367b082850207e87ffeda3cccf74d96 logic/propositional_logic
quantum_lock 2f96d165fe0a33fb3dabdc92ffb99966 graphs/quantum_lock
ransom_note 06f34772388aac3b17f7aaba8cb33bb7 algorithmic/ransom_note dataset
rearc d528b06657d26a01c839c9ed88aa13d7 arc/rearc arc/board_format
rectangle_count cbe4bb706e5db274cd9c2d600ce50e23 cognition/rectangle_count
rotate_matrix 1f96cb193c11da6577e37b765369998f algorithmic/rotate_matrix dataset
rotten_oranges 7ec7f57d564c0b8d79129fed0d52d51a algorithmic/rotten_oranges dataset
rubiks_cube 8c5d3fb2910d03a97e13eb5d859f898e cognition/rubiks_cube magiccube/*
rush_hour 75a9a4f18b7376661551e7febc67f53f games/rush_hour
self_reference 8b0eebadba3c07a56a58fd9f88830be4 logic/self_reference
sentence_reordering 0a5ec0e35dccd4ab85edf8a158ab575f algorithmic/sentence_reordering
shortest_path 40756d552a64f6c7b513e2e6eb2d5775 graphs/shortest_path
simple_equations cb41cf57292ebe3d069130ec7619c59a algebra/simple_equations dataset
simple_geometry 6a12defef93f45e27265df0efda9e6a7 geometry/simple_geometry dataset
sokoban 93b95fe10df2adf86a1c5f9346bd0743 games/sokoban games/contrib/sokoban/src/*
spell_backward a27f14e886fad4d7dd1bf0506644be70 algorithmic/spell_backward
string_manipulation 6d4a36a032829a41333d3ce26fc20122 algorithmic/string_manipulation dataset
string_splitting 587859ff940ac8152379439923a1dae2 algorithmic/string_splitting dataset
string_synthesis b743afe2311f5ff47b4334c2f29502e3 algorithmic/string_synthesis dataset
sudoku dcb9e0c968d33b0f7883390d7b3155aa games/sudoku
survo 6d506c11d914f8b1d7c910c26b8da9a4 games/survo
syllogism bbd52f1b923548a48ffc128a3a65c6c9 logic/syllogisms dataset
time_intervals b42d9a9f992eead49d028f13e0ffd454 arithmetic/time_intervals
tower_of_hanoi 6a983d45cd5ef3a6380b509ef7313af8 games/tower_of_hanoi
tsumego 5978a0f3b5b785e98b58190fb5ddf904 games/tsumego
word_ladder 8a82e0dee96401a019b6842bb99c2300 algorithmic/word_ladder
word_sequence_reversal 21fb1076252bd60b25a8d615c15431ae algorithmic/word_sequence_reversal dataset
word_sorting 32d554acf0613b0cec4236a806165beb algorithmic/word_sorting
zebra_puzzles 41312f2635a0a7f920fd6a8006a9e8b1 logic/zebra_puzzles
"""
"""task, digest of what was read, its files: below reasoning_gym/, or of the two packages that scorers use."""

_PACKAGES = ("magiccube", "zss")
READ = {task: (digest, files) for task, digest, *files in map(str.split, _READ.strip().splitlines())}
"""By task: (digest, files) of a scorer that was read: it compares text, numbers, JSON or moves."""


def refusal(task: str) -> str:
    """Why the answers to ``task`` are not graded here, "" if they are. Imports nothing of reasoning_gym."""
    if task in OURS:
        return ""
    if task in REFUSED:
        return f"reasoning_gym's task {task} is refused: {REFUSED[task]}"
    if task not in READ:
        return f"reasoning_gym's task {task} is refused: it is not known if its scorer executes answers; {_INSTEAD}"
    digest, files = READ[task]
    if source_digest(files) != digest:
        return (
            f"reasoning_gym's task {task} is refused: the installed scorer is not the one that was checked, so it may "
            f"execute answers; install the release that StreamRL requires (pip install -e .), or {_INSTEAD}"
        )
    return ""


_INSTEAD = "name a reward of your own (scoring.reward), which gets the same entry"


def source_digest(files: list[str]) -> str:
    """SHA-256 of the installed source, 32 digits; "" where there is none. A star stands for all files of a folder."""
    found = [path for name in files for path in _paths(name)]
    return (
        hashlib.sha256(b"".join(path.read_bytes() for path in found)).hexdigest()[:32]
        if all(path.is_file() for path in found)
        else ""
    )


def _paths(name: str) -> list[Path]:
    package = name.partition("/")[0] if name.startswith(_PACKAGES) else "reasoning_gym"
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return [Path(name)]
    root = Path(spec.submodule_search_locations[0])
    path = root / name.removeprefix(f"{package}/")
    return sorted(path.parent.glob("*.py")) if path.name == "*" else [path.with_suffix(".py")]
