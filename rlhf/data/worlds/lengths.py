"""Preference pairs of random words, as long as real ones: memory and speed depend on lengths and not on words.

They go with the stand-in tokenizer (`tokenizer.source: words`), for which every number below is one token.
"""

import random
from pathlib import Path

from rlhf.data.worlds import write_files

PROMPT_OVERHEAD = 3  # BOS and the two marks of a turn
WORDS = 10_000  # fewer than any real vocabulary has
# prompt/chosen/rejected tokens of 200 of the 1,794 usable dialogues in the first 1,800 of HH-RLHF's harmless-base test
# split, at even distances in the order of their length, with Llama-2's tokenizer; a prompt counts BOS, a response does
# not count EOS.
# All 1,794 have 136, 43 and 53 tokens on average, the 200 here much the same.
HH = """
    16/12/8 22/6/9 24/7/9 26/9/1 22/15/12 25/5/13 24/17/16 25/17/17 24/20/15 22/16/23 21/26/22 25/17/23 19/14/31
    21/30/20 22/25/30 28/24/25 18/37/22 26/30/17 20/38/9 32/27/23 26/12/35 29/33/32 26/14/37 32/32/26 22/15/44 25/32/42
    19/49/18 24/45/11 19/9/51 22/8/49 24/19/48 31/42/29 25/49/36 27/48/42 24/17/53 19/19/59 62/16/14 29/40/51 21/61/3
    26/26/57 35/50/9 47/39/11 24/16/63 32/56/33 22/23/67 24/19/66 57/34/8 24/40/69 35/59/21 34/23/62 73/24/17 37/5/62
    63/37/37 77/24/13 57/46/14 74/30/21 74/7/32 19/89/72 24/85/70 41/6/69 24/88/52 26/87/39 102/5/12 20/17/96 42/15/75
    42/76/8 31/88/78 51/69/55 84/10/38 81/28/42 50/1/74 78/47/37 21/106/77 80/32/48 103/19/26 108/11/22 80/53/37
    108/26/10 25/7/111 22/115/41 99/39/6 56/15/84 21/24/120 99/42/24 112/30/23 112/16/31 110/15/34 121/11/24 93/54/15
    76/72/50 97/52/13 35/18/116 127/26/6 113/42/28 100/32/56 104/53/17 114/15/46 134/27/17 151/11/10 54/66/110 90/61/75
    131/35/32 148/19/18 152/15/17 133/7/38 141/12/32 92/22/84 135/8/42 89/90/31 168/11/2 126/26/55 143/39/19 60/124/38
    121/11/64 130/11/57 154/34/25 180/10/10 167/25/12 135/60/23 126/11/71 140/17/59 178/23/4 186/16/11 173/13/30
    136/9/69 174/32/17 169/12/38 203/2/5 143/67/35 73/30/139 159/16/56 144/35/73 170/49/34 197/11/23 127/26/97 173/30/52
    156/72/39 187/35/43 59/11/175 164/14/73 95/144/34 163/78/48 132/112/48 203/30/43 218/30/21 120/132/118 176/79/30
    217/41/8 174/20/87 232/25/31 199/23/66 194/74/27 168/104/20 167/12/109 227/3/52 179/83/102 238/46/18 211/78/62
    232/51/62 162/136/85 179/16/122 190/7/115 219/25/88 256/35/54 124/129/191 272/16/46 229/93/60 265/12/60 242/85/73
    126/212/46 290/50/29 272/29/74 238/3/112 251/44/105 297/28/63 255/111/72 344/24/8 325/52/50 299/14/86 323/67/28
    365/35/20 334/71/49 359/56/4 176/244/58 314/80/116 325/70/115 340/35/106 424/30/6 280/132/189 423/24/56 288/203/80
    449/56/49 424/91/103 99/113/447 502/77/86 451/179/155 498/11/168 495/210/61 601/69/207 765/177/62
"""


def lengths_of_hh() -> list[tuple[int, int, int]]:
    """Return the tokens of (prompt, chosen, rejected) of the dialogues in `HH`."""
    rows = [row.split("/") for row in HH.split()]
    return [(int(prompt), int(chosen), int(rejected)) for prompt, chosen, rejected in rows]


def write(directory: Path, *, pairs: int, shape: str, longest: int, seed: int) -> list[Path]:
    """Write pairs.jsonl, of `pairs` rows with distinct prompts.

    `shape` is `hh`, lengths of real dialogues, or else prompt and responses have `longest` tokens each.
    """
    rng = random.Random(f"lengths:{seed}")
    table = lengths_of_hh()

    def text(tokens: int) -> str:
        return " ".join(str(rng.randrange(WORDS)) for _ in range(tokens))

    rows: dict[str, dict[str, str]] = {}
    while len(rows) < pairs:
        prompt, chosen, rejected = rng.choice(table) if shape == "hh" else (longest + PROMPT_OVERHEAD, longest, longest)
        words = text(prompt - PROMPT_OVERHEAD)
        rows[words] = {"prompt": words, "chosen": text(chosen), "rejected": text(rejected)}
    return write_files(directory, {"pairs.jsonl": rows.values()})
