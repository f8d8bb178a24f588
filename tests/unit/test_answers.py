"""Answers: where a response gives one, and which of them are the right one."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.scoring.answers import extract_answer, find_answer, plain, unwrap
from workers.scoring.equality import asks_for_number, reads_as_number, same_answer
from workers.scoring.rewards import RewardSpec, Scorer, build_reward

MARKER = "Answer:"


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("Answer: 7", "7"),
        ("2 + 5 = 7. answer: 7.", "7"),
        ("End with 'Answer: 7'.", "7"),
        ('I say "Answer: 7".', "7"),
        ("Answer: 3\nno, wait.\nAnswer: 7", "7"),
        ("Answer: 7\nThat is all.", "7"),
        ("**Answer:** 7", "7"),
        ("**Answer: 7**", "7"),
        ("Answer: $7$", "7"),
        ("Answer: \\boxed{7}.", "7"),
        ("Answer: $\\boxed{\\text{7}}$.", "7"),
        ("Answer: it is \\boxed{7} here", "7"),
        ("Answer:\n\\[\n7\n\\]\nThat is all.", "7"),
        ("Answer: $$\n\\boxed{7}\n$$", "7"),
        ("Answer: ```\n7\n```", "7"),
        ("Answer: R U F'", "R U F'"),
        ("Answer: <7>", "7"),
        ("Answer: <answer>7</answer>", "7"),
        ("Answer:\n-7", "-7"),
        ("Answer: the red fox", "the red fox"),
        ("\u0130\u0130\u0130 Answer: 55", "55"),  # longer in lower case
        ("Answer: \\boxed{7}8", "7 8"),  # digits that touch a box
        ("Answer: 8\\boxed{7}", "8 7"),
        ("Answer: \\boxed{\\boxed{7}8}", "7 8"),
        ("Answer: -\\boxed{7}", "-7"),
        ("Answer: <not>7</not>", "<not>7</not>"),
        ("Answer: **7** apples", "7 apples"),
        ("Answer: => 7", "7"),
        ("\\textbf{Answer:} 7", "7"),
        ("Answer: 6, no wrong answer: 7", "6, no wrong answer: 7"),
        ("Answer:", None),
        ("Answer:  \n ", None),
        ("7", None),
        ("", None),
    ],
)
def test_the_answer_is_what_follows_the_last_marker(response: str, answer: str | None) -> None:
    assert extract_answer(response, MARKER) == answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("7", "7"),
        ("So it is \\boxed{7}, as $7 = 7$.", "7"),
        ("It is 7.\nOr not.", None),
        ("Answer: 8, \\boxed{7}", "7"),
    ],
)
def test_a_prompt_that_asks_for_no_marker_is_answered_without_one(response: str, answer: str | None) -> None:
    assert find_answer(response, MARKER, marker_asked=False) == answer
    assert find_answer(response, MARKER, marker_asked=True) == extract_answer(response, MARKER)


def test_an_answer_has_as_many_lines_as_the_right_one() -> None:
    assert extract_answer("Answer:\n1 2\n3 4\nThat is all.", MARKER, lines=2) == "1 2\n3 4"


@given(st.text())
def test_no_response_breaks_the_extraction(response: str) -> None:
    answer = extract_answer(f"Answer:{response}", MARKER)
    assert answer is None or (answer and "\n" not in answer)


@given(st.text(), st.text())
def test_no_answer_breaks_the_comparison(right: str, said: str) -> None:
    assert same_answer(right, said) in (True, False)
    assert not unwrap(right) or same_answer(right, unwrap(right)) or unwrap(right).strip("+-").casefold() in NOT_FINITE


NOT_FINITE = ("nan", "inf", "infinity", "nani", "infi", "infinityi")


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("\\dfrac12 \\text{ cm}\u00b2", "\\frac{1}{2} cm ^2"),
        ("10 \u2212 3\u00d710\u207b\u00b3", "10 - 3\\times 10^{-3}"),
        ("21,\\!000", "21,000"),
        ("1\u00bd", "1 1/2"),
        ("40^{\\circ}", "40\u00b0"),
        ("\\left( 0, \\sqrt3 \\right)", "( 0, \\sqrt{3} )"),
        ("\uff18\uff16", "86"),
        ("{1\\over2} {n \\choose k}", "\\frac{1}{2} \\binom{n}{k}"),
        ("\\begin{cases}x=1\\\\y=2\\end{cases}", "x=1, y=2"),
    ],
)
def test_an_answer_has_one_spelling(text: str, spelled: str) -> None:
    assert plain(text) == spelled


@pytest.mark.parametrize(
    "text",
    [
        *[
            "7",
            "-7.50",
            "1,000",
            "$12",
            "12%",
            "+3.",
            "\u22125",
            ".5",
            "7 apples",
            "x = 7",
            "1e5",
            "seven",
            "7 million",
        ],
        *["3 + 4 = 7", "1/2 or 0.5", "7 = x"],
    ],
)
def test_a_number_is_read_in_its_usual_forms(text: str) -> None:
    assert reads_as_number(text)


@pytest.mark.parametrize("text", ["", "nan", "inf", "--1", "$", "x", "1 or 2", "1, 2", "four two", "x = y", "<result>"])
def test_other_text_is_no_number(text: str) -> None:
    assert not reads_as_number(text)


@pytest.mark.parametrize("right", ["5", "x = 5", "3\\text{ n}", "\\$5"])
def test_a_right_answer_asks_for_a_number(right: str) -> None:
    assert asks_for_number(right)


@pytest.mark.parametrize("right", ["x^2 + y^2 = 25", "3 n", "x = 1, y = 2", "x > 3", "Paris"])
def test_an_equation_or_a_variable_asks_for_no_number(right: str) -> None:
    assert not asks_for_number(right)


SAME = {
    "numbers": [
        *[("115,000", "115000"), ("1,234,567", "1234567"), ("10000", "10,000"), ("72", "72.00"), ("0.1", "0.10")],
        *[
            ("1234567", "1.234.567"),
            ("1234.5", "1.234,5"),
            ("1234", "1 234"),
            ("1234567", "12,34,567"),
            ("-16", "- 16"),
        ],
        *[("1.39 \\times 10^{-10}", "1.39e-10"), ("0.\\overline{3}", "1/3"), ("14\\frac{6}{7}", "14 6/7")],
        *[("1/3", "0.3333"), ("\\frac{3}{4}", "0.75"), ("\\sqrt{2}", "1.41421"), ("2/3", "0.666...")],
        *[("0.30000000000000004", "0.3"), ("0.6666666667", "0.66666666666")],
    ],
    "percent, units, names": [
        *[("25", "25%"), ("0.25", "25%"), ("25\\%", "0.25"), ("25\\%", "25"), ("72", "$72"), ("\\$36", "36 dollars")],
        *[("42", "42 apples"), ("9\\text{ min}", "9 minutes"), ("864 \\mbox{ inches}^2", "864 square inches")],
        *[("40^\\circ", "40 degrees"), ("164 \\pi \\mbox{ square feet}", "164\u03c0 ft^2"), ("42", "x = 42")],
        *[("x = 5", "5"), ("42", "f(2) = 42"), ("42", "m + n = 42"), ("42", "6*7 = 42"), ("y = -3x + 30", "-3x+30")],
    ],
    "lists": [
        *[("0,1", "0, 1"), ("0,1", "(0,1)"), ("1,2", "2,1"), ("3,5,7", "3, 5, 7"), ("[1, 2, 3]", "1, 2, 3")],
        *[("4, 0, -4", "-4, 0 and 4"), ("2,3", "x = 2 or x = 3"), ("x=2,y=3", "x=2, y=3"), ("\\{1,2\\}", "2, 1")],
        *[("\\pm 2", "2, -2"), ("6, 8\\text{, and }10", "6, 8, 10"), ("(1,2),(3,4)", "(3,4), (1,2)"), ("3", "[3]")],
        *[
            ("(-\\infty,3)\\cup(3,\\infty)", "(-\u221e,3)\u222a(3,\u221e)"),
            ("x>3", "(3, \\infty)"),
            ("Tom, Jerry", "Jerry and Tom"),
        ],
    ],
    "numbers in words, times, ratios, bases": [
        *[("5", "five"), ("42", "forty-two"), ("42", "forty-two apples"), ("-125", "minus 125"), ("1/2", "one half")],
        *[
            ("3/4", "three-quarters"),
            ("12000", "12 thousand"),
            ("1,450,000", "$1.45 million"),
            ("98\\%", "ninety-eight percent"),
        ],
        *[("22:15", "10:15 p.m."), ("8:30A.M", "08:30 am"), ("2:40 PM", "14:40"), ("5:1", "5 to 1"), ("3:4", "3/4")],
        *[
            ("3:4", "3 \u2236 4"),
            ("5:1", "5{:}1"),
            ("4:3", "x = 4:3"),
            ("204_5", "204 base 5"),
            ("204_5", "(204)_{\\text{five}}"),
        ],
        *[
            ("80\\text{ cents}", "$0.80"),
            ("80\\text{ cents}", "80\u00a2"),
            ("1600", "1600\u20ac"),
            ("1600", "$1600/year"),
        ],
    ],
    "equal values": [
        *[
            ("\\frac34", "\\frac34 = 0.75"),
            ("25", "3^2+4^2 = 25"),
            ("1024", "2^{10} = 1024"),
            ("25", "25 = 5^2"),
            ("5", "5 (five)"),
        ],
        *[("1/2", "1/2 or 0.5"), ("1/2", "0.5 (1/2)"), ("\\sqrt{2}", "\\sqrt{2} (approximately 1.414)")],
        *[
            ("25", f"{name} = 25")
            for name in ("|AB|", "[ABC]", "E[X]", "x_{\\max}", "f^{-1}(3)", "\\vec a\\cdot\\vec b", "m\\angle A")
        ],
        *[
            ("2x", "\\frac{dy}{dx} = 2x"),
            ("25", "25 = x"),
            ("x=5", "5 = x"),
            ("\\frac12", "\\sin 30^\\circ = \\frac12"),
        ],
    ],
    "sets": [
        *[("x>3", said) for said in ("\\{x \\mid x>3\\}", "]3,\\infty[", "(3, inf)", "all x > 3", "3 < x")],
        *[("-1<x<3", said) for said in ("x > -1 and x < 3", "]-1,3[", "(-1,3)", "3>x>-1")],
        *[
            ("(-\\infty,2)\\cup(2,\\infty)", said)
            for said in ("x<2 or x>2", "x \\ne 2", "\\mathbb{R}\\setminus\\{2\\}")
        ],
        *[("\\mathbb{R}", "all real numbers"), ("(-\\infty,\\infty)", "\\mathbb{R}"), ("\\emptyset", "no solution")],
        *[("(1,2)", "y=2,x=1"), ("x=1,y=2", "(1,2)"), ("$(1,2)$, $(2,1)$", "(2,1) and (1,2)"), ("(1,2)", "A(1,2)")],
    ],
    "mathematics": [
        *[("R-r", "-r+R"), ("\\frac{t^2}{2}", "\\frac12 t^2"), ("\\frac{\\sqrt{3}}{2}", "\\sin 60^\\circ")],
        *[("\\frac{1}{2}", "\\frac{2}{4}"), ("x^2-1", "(x-1)(x+1)"), ("a < 12", "12 > a"), ("5!", "120")],
        *[("\\frac{\\pi}{4}", "\u03c0/4"), ("1,-1,i,-i", "i,-i,1,-1"), ("2^{4950}", "2^{4950}")],
        ("\\begin{pmatrix} 1 & 0 \\\\ 0 & 3 \\end{pmatrix}", "\\begin{bmatrix}1&0\\\\0&3\\end{bmatrix}"),
    ],
    "text and sentences": [
        *[("Paris", "paris"), ("\\text{(B)}", "B"), ("B", "(B)"), ("Evelyn", "EVELYN"), ("\\text{Evelyn}", "Evelyn")],
        *[("42", "So the final answer is 42"), ("42", "42 is the answer"), ("42", "She has 42 apples left")],
        *[("42", "The least common multiple is 42."), ("42", "The value of $x$ is $42$."), ("42", "42 \\square")],
        *[
            ("yes", "Yes, because 2 is even"),
            ("\\text{(E)}", "option E"),
            ("B", "B is correct"),
            ("Monday", "on Monday"),
        ],
        *[("B", "The answer is B"), ("\\frac{1}{2}", "the answer is $\\frac{1}{2}$, as required")],
    ],
}


@pytest.mark.parametrize(("right", "said"), [pair for pairs in SAME.values() for pair in pairs])
def test_a_right_answer_is_right_however_it_is_written(right: str, said: str) -> None:
    assert same_answer(right, unwrap(said))


DIFFERENT = {
    "numbers": [
        *[
            ("1000000007", "1000000008"),
            ("99999999999", "99999999998"),
            ("42", "-42"),
            ("42", "420"),
            ("42", "42.0001"),
        ],
        *[("0.25", "0.25%"), ("1/3", "0.33"), ("1/3", "0.3334"), ("1.5", "1,5"), ("42", "nan"), ("nan", "nan")],
        *[("3.89e-10", "2.55e-10"), ("42", "42 million"), ("42", "42x"), ("42", "negative 42"), ("42", "2x = 42")],
        *[("9\\text{ min}", "9 hours"), ("20\\text{ miles}", "20 km"), ("0.6666666667", "0.66666666677")],
    ],
    "lists": [
        *[("0,1", "1"), ("0,1", "01"), ("1,2", "12"), ("12", "1,2"), ("3,5,7", "357"), ("(1,2)", "(2,1)")],
        *[("(0,1)", "[0,1]"), ("[0,1)", "(0,1)"), ("(3,\\infty)", "[3,\\infty)"), ("1,2", "1,2,3"), ("1,2,2", "1,1,2")],
        ("\\{0,1\\}", "[0,1]"),
        *[("(1,2)", said) for said in ("1 or 2", "x=1 or x=2", "x=1 or y=2", "y=1,x=2")],
        *[("[1,2]", "x=1,x=2"), ("(2,-2)", "\\pm 2"), ("(3,5,7)", "3 or 5 or 7"), ("1,600", "(1,600)")],
        *[("x=1,y=2", said) for said in ("(2,1)", "2,1", "x=1 or y=2", "x=2,y=1")],
        *[("\\{1,2\\}", "1<x<2"), ("\\{1,2\\}", "\\{1,\\{2\\}\\}"), ("-1<x<3", "\\{-1,3\\}"), ("-1<x<3", "-1,3")],
        *[
            ("x>3", "(3,\\infty]"),
            ("x<-2 or x>3", "x<-2 and x>3"),
            ("\\emptyset", "\\{\\emptyset\\}"),
            ("\\emptyset", "1>2"),
        ],
        ("\\mathbb{R}", "\\pi \\in \\mathbb{R}"),
    ],
    "times, ratios, bases": [
        *[
            ("5:1", "5:1:1"),
            ("5:1", "5:01"),
            ("3:4", "3:04"),
            ("3:4", "4:3"),
            ("22:15", "10:15 AM"),
            ("2:40 PM", "2:40 AM"),
        ],
        *[
            ("204_5", "204_6"),
            ("6th", "6m"),
            ("42", "42nd"),
            ("42", "four two"),
            ("1/2", "1/2 or 0.6"),
            ("1/2", "\\frac{1}{2} or \\frac{1}{2}1"),
            ("5", "5 (6)"),
        ],
        *[
            ("80\\text{ cents}", "$80"),
            ("25", "\\sqrt{x} = 25"),
            ("25", "x+1 = 25"),
            ("25", "24 = 25"),
            ("25", "-x = 25"),
        ],
    ],
    "letters and signs": [
        *[
            ("R-r", "r-R"),
            ("\\frac{M}{m+M}", "\\frac{m}{m+M}"),
            ("2Rr+r", "2Rr+R"),
            ("T\\frac{dx}{dt}=t", "t\\frac{dx}{dT}=T"),
        ],
        *[("x^2+1", "x^2+1'"), ("x^2+1", "x^2+1\u2245x"), ("x^2+1", "x^2+1(x)"), ("42", "42 \\approx 50")],
    ],
    "mathematics": [
        *[
            ("x>3", "x\\ge 3"),
            ("x=5", "y=5"),
            ("\\Delta", "\\delta"),
            ("x^2", "2^x"),
            ("42", "> 42"),
            ("42", "x^2 = 42"),
        ],
        *[
            ("\\frac{1}{2}", "\\frac{1}{3}"),
            ("\\frac{1}{2^{98}}", "\\frac{3}{2^{98}}"),
            ("\\sqrt{2}", "1.42"),
            ("42", "41 = 42"),
        ],
    ],
    "words beside a number": [
        *[
            ("42", f"{words} 42")
            for words in ("a factor of", "the digits of", "just shy of", "beneath", "zero", "Suppose it is")
        ],
        *[
            ("42", f"42 {words}")
            for words in ("upwards", "backwards", "tens", "tripled", "and higher", "in hexadecimal", "dx")
        ],
        *[
            ("42", f"{words} 42")
            for words in ("I doubt that it is", "Some say", "A common mistake is", "The distractor is")
        ],
        *[("42", "It is untrue that the answer is 42"), ("linear", "The opposite is linear"), ("yes", "yes, but no")],
    ],
    "words and guesses": [
        *[("Paris", "Piars"), ("no", "on"), ("42", "41 or 42"), ("42", "41, 42"), ("42", "not 42"), ("B", "A or B")],
        *[("B", "A, B, C, D"), ("42", "between 41 and 43"), ("42", "at least 42"), ("42", "41 and 42"), ("", "")],
    ],
}


@pytest.mark.parametrize(("right", "said"), [pair for pairs in DIFFERENT.values() for pair in pairs])
def test_a_wrong_answer_near_a_right_one_is_wrong(right: str, said: str) -> None:
    assert not same_answer(right, unwrap(said))


@pytest.fixture(scope="module")
def score() -> Scorer:
    return build_reward(RewardSpec(source="jsonl", task="", params={}, answer_marker=MARKER, well_formed_reward=0.0))


@pytest.mark.parametrize(
    "said",
    [
        *[
            "10^{10^{10}}",
            "9^{9^{9^{9}}}",
            "99999999!",
            "(x+1)^{10000}",
            "(2^{9999})^{9999}",
            "7!!!!!!!!",
            "1e999999999",
        ],
        *["\\sum_{k=1}^{10000000} k", "\\binom{99999999}{4999999}", "(" * 900 + "x" + ")" * 900, "9" * 4000],
        *[
            "\\frac{" * 300,
            "{" * 1900,
            "$" * 1900,
            "1," * 900,
            "x = " * 400,
            "\\int_0^1 e^{x^2}\\sin(x^3)dx",
            "is " * 600,
        ],
    ],
)
def test_an_answer_that_cannot_be_compared_is_wrong_within_its_time(score: Scorer, said: str) -> None:
    started_s = time.process_time()
    reward = score("q", f"Answer: {said}", {"answer": "x + \\frac{1}{2}"})
    assert reward.value == 0.0
    assert time.process_time() - started_s < 5, "GRADE_CPU_S bounds it"
