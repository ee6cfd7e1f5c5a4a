#!/usr/bin/env python3
"""Writes tasks for lm-evaluation-harness that need no network: verses.py FOLDER

`larder_verses` has one right end of a verse among four: log-likelihoods of ends after a common start.
`larder_text` has whole verses: log-likelihoods of texts from their first token on.
"""

import json
import pathlib
import sys

VERSES = [
    "In the beginning God created the heaven and the earth",
    "And the earth was without form, and void; and darkness was upon the face of the deep",
    "And the Spirit of God moved upon the face of the waters",
    "And God said, Let there be light: and there was light",
    "And God saw the light, that it was good",
    "And God divided the light from the darkness",
    "And God called the light Day, and the darkness he called Night",
    "And the evening and the morning were the first day",
    "And God said, Let there be a firmament in the midst of the waters",
    "And God called the firmament Heaven",
    "And God called the dry land Earth",
    "And the gathering together of the waters called he Seas",
    "And the evening and the morning were the third day",
    "And God made two great lights",
    "And God said, Let us make man in our image, after our likeness",
    "So God created man in his own image, in the image of God created he him",
    "And on the seventh day God ended his work which he had made",
    "And the LORD God planted a garden eastward in Eden",
    "And a river went out of Eden to water the garden",
    "And they heard the voice of the LORD God walking in the garden",
]

CHOICES = """\
task: larder_verses
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{start}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""

TEXTS = """\
task: larder_text
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
"""


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    ends = [verse.rsplit(" ", 1)[1] for verse in VERSES]
    docs = []
    for at, verse in enumerate(VERSES):
        # Distinct ends of other verses. The right one takes each place in turn.
        wrong = list(dict.fromkeys(end for end in ends[at + 1 :] + ends[:at] if end != ends[at]))[:3]
        choices = wrong[: at % 4] + [ends[at]] + wrong[at % 4 :]
        docs.append({"text": verse, "start": verse.rsplit(" ", 1)[0], "choices": choices, "answer": at % 4})
    file = folder / "verses.jsonl"
    file.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    for name, task in [("larder_verses", CHOICES), ("larder_text", TEXTS)]:
        (folder / f"{name}.yaml").write_text(task.replace("FILE", str(file)))


if __name__ == "__main__":
    main()
