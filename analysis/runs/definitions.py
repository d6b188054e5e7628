"""The words of a page of results, for readers who have not seen the documentation."""

from __future__ import annotations

# By word; `code` is marked as in Markdown.
DEFINITIONS = {
    "Speedup": "tokens per second of the method over those of plain decoding (ar), measured in the "
    "same process on the same prompts, case by case in turn. The prompt's pass is not in it.",
    "End-to-end": "the same ratio with the prompt's pass in the time.",
    "MAT": "mean accepted tokens: new tokens after the first, per target pass. Plain decoding has "
    "1.00. It is what a method gains before it costs anything.",
    "[low, high]": "95 % interval of a bootstrap over prompts. It covers other prompts like these, "
    "not other days and machines.",
    "Against the best": "best: all others are shown to be slower. highest: the fastest here, but "
    "not all others are shown to be slower. undecided: the data cannot tell it from the fastest. "
    "p: corrected for the number of comparisons.",
    "Outputs": "turns by what the audit found. equal: the tokens of plain decoding. near tie: "
    "other tokens, each within the number format's tolerance of the likeliest. BUG: anything else. "
    "differ: another engine's answer that is not the same server's plain answer.",
    "Case": "a question with all its turns. A case that failed for one method counts for none.",
}
