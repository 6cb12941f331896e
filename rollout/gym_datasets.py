"""Which datasets of reasoning-gym may score: those whose scorer runs nothing that a client or a model wrote.

Others hand the completion, or the entry that the client sent, to `eval`, or to sympy's `parse_expr`, which does so too.
`tests/integration/test_gym_datasets.py` reads the scorers of the installed version and compares.
"""

from collections.abc import Mapping
from typing import Any

READ_VERSION = "0.1.25"
"""Of reasoning-gym: the scorers of another one are not known to be the same."""

SCORING = frozenset({
    "ab", "acre", "advanced_geometry", "aiw", "arc_1d", "arc_agi", "base_conversion", "basic_arithmetic", "bf",
    "binary_alternation", "boxnet", "caesar_cipher", "calendar_arithmetic", "chain_sum", "circuit_logic", "coin_flip",
    "color_cube_rotation", "complex_arithmetic", "count_bits", "count_primes", "course_schedule", "cryptarithm",
    "decimal_arithmetic", "decimal_chain_sum", "dice", "emoji_mystery", "family_relationships", "figlet_font",
    "fraction_simplification", "futoshiki", "game_of_life", "game_of_life_halting", "gcd", "graph_color",
    "group_anagrams", "gsm_symbolic", "isomorphic_strings", "jugs", "kakurasu", "knight_swap", "knights_knaves",
    "largest_island", "lcm", "leg_counting", "letter_counting", "letter_jumble", "list_functions", "mahjong_puzzle",
    "manipulate_matrix", "maze", "mini_sudoku", "modulo_grid", "needle_haystack", "number_filtering", "number_format",
    "number_sequence", "palindrome_generation", "palindrome_partitioning", "path_star", "polynomial_equations",
    "power_function", "prime_factorization", "products", "propositional_logic", "quantum_lock", "ransom_note", "rearc",
    "rectangle_count", "rotate_matrix", "rotten_oranges", "rush_hour", "self_reference", "sentence_reordering",
    "shortest_path", "simple_equations", "simple_geometry", "spell_backward", "string_manipulation", "string_splitting",
    "string_synthesis", "sudoku", "survo", "syllogism", "time_intervals", "tower_of_hanoi", "tsumego", "word_ladder",
    "word_sequence_reversal", "word_sorting", "zebra_puzzles",
})  # fmt: skip


def refused(params: Mapping[str, Any]) -> str | None:
    """What is wrong with `params["dataset"]`; None where it may score."""
    if "dataset" not in params:
        return "required, but missing: the name of a dataset of reasoning-gym"
    if isinstance(dataset := params["dataset"], str) and dataset in SCORING:
        return None
    return (
        f"{dataset!r:.80} is no dataset that scores here: a scorer of reasoning-gym may not run what a client or a"
        " model wrote; docs/train.md names the datasets that are left out"
    )
