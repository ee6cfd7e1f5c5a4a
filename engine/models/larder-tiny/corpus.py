"""Training documents of larder-tiny, made from Debian packages.

Every text is out of copyright. The packages are fetched with apt and unpacked,
not installed; see README.md for their versions and licences.

A document is a string that starts with <|bos|> and ends with <|eos|>: either a
plain chapter or a chat. About a third of the training text is chat.
"""

import gzip
import random
import re
import struct
import subprocess
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

PACKAGES = [
    "bible-kjv",
    "bible-kjv-text",
    "display-dhammapada",
    "miscfiles",
    "r-cran-janeaustenr",
]
BOS, EOS = "<|bos|>", "<|eos|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
VERSES_PER_PARAGRAPH = 4
HELD_OUT_EVERY = 60  # one chapter in so many is kept for validation

# Verses and paragraphs with these words are left out.
COARSE = re.compile(
    r"\b(piss\w*|dung|whor\w*|harlot\w*|fornicat\w*|concubin\w*|nakedness"
    r"|circumcis\w*|foreskin\w*|ravish\w*|bastard\w*|copulation|menstru\w*"
    r"|buttocks|bowels|negro\w*|gips\w*)\b",
    re.IGNORECASE,
)


@dataclass
class Chapter:
    """A chapter: the style it is written in, a heading and paragraphs."""

    style: str
    title: str
    paragraphs: list

    def text(self):
        """The chapter as plain text, one paragraph a line."""
        return "\n".join([self.title, *self.paragraphs])


# ---------------------------------------------------------------- packages


def unpack(folder):
    """Fetch and unpack the packages below `folder`; returns the root."""
    folder = Path(folder)
    root = folder / "root"
    if root.exists():
        return root
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder, check=True)
    for deb in sorted(folder.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", str(deb), str(root)], check=True)
    return root


def clean(text):
    """Join lines, drop emphasis marks and doubled spaces."""
    text = text.replace("_", "").replace("\u2019", "'")
    return re.sub(r"\s+", " ", text).strip()


def keep(paragraph):
    """True for prose; false for coarse words and for ornaments."""
    letters = sum(c.isalpha() for c in paragraph)
    return letters >= 0.6 * len(paragraph) and not COARSE.search(paragraph)


def paragraphs_of(lines):
    """Group lines into paragraphs at blank lines."""
    text = "\n".join(line.rstrip() for line in lines)
    return [clean(p) for p in re.split(r"\n\s*\n", text) if clean(p)]


def bible(root):
    """The King James Bible, by chapter, verses joined into paragraphs."""
    bible_program, data = root / "usr/bin/bible", root / "usr/lib"
    command = [bible_program, "-l0", "-p", data, "gen1:1-rev22:21"]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    verses = parse_bible(out)
    chapters = []
    for title, group in verses.items():
        group = [v for v in group if keep(v)]
        step = VERSES_PER_PARAGRAPH
        parts = [" ".join(group[i:i + step]) for i in range(0, len(group), step)]
        chapters.append(Chapter("bible", title, parts))
    return chapters, verses


def parse_bible(out):
    """Verses by chapter title, from the output of bible(1)."""
    verses, title = {}, None
    for line in out.splitlines():
        numbered = re.match(r"\s+(\d+)\s+(\S.*)", line)
        if numbered:
            verses[title].append(clean(numbered.group(2)))
        elif line.strip():
            title = clean(line)
            verses.setdefault(title, [])
    return verses


def rdb_strings(path):
    """The character vectors of an R lazy-load database: each record is a
    big-endian length and a zlib stream of a serialised (XDR) vector."""
    data, vectors = Path(path).read_bytes(), []
    while data:
        stream = zlib.decompressobj()
        vectors.append(parse_strsxp(stream.decompress(data[4:])))
        data = stream.unused_data
    return vectors


def parse_strsxp(raw):
    """The strings of one serialised R character vector (format 3, XDR)."""
    assert raw[:2] == b"X\n"
    at = 2 + 12
    encoding = struct.unpack_from(">i", raw, at)[0]
    at += 4 + encoding
    flags, count = struct.unpack_from(">ii", raw, at)
    assert flags & 0xFF == 16, "not a character vector"
    at += 8
    strings = []
    for _ in range(count):
        length = struct.unpack_from(">i", raw, at + 4)[0]
        at += 8
        strings.append(raw[at:at + max(length, 0)].decode("utf-8", "replace"))
        at += max(length, 0)
    return strings


def austen(root):
    """The six novels of Jane Austen, by chapter."""
    path = root / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
    chapters = []
    for lines in rdb_strings(path):
        book = clean(lines[0]).title().replace(" And ", " and ")
        number, body = 0, []
        for line in lines:
            if re.match(r"\s*chapter\s+[\divxlc]+\.?\s*$", line, re.IGNORECASE):
                if number:
                    chapters.append(austen_chapter(book, number, body))
                number, body = number + 1, []
            elif not re.match(r"\s*volume\s+[ivx]+\s*$", line, re.IGNORECASE):
                body.append(line)
        chapters.append(austen_chapter(book, number, body))
    return chapters


def austen_chapter(book, number, lines):
    """One chapter of a novel."""
    parts = [p for p in paragraphs_of(lines) if keep(p)]
    parts = [p for p in parts if p not in ("FINIS", "THE END", "Finis")]
    return Chapter("novel", f"{book}, Chapter {number}", parts)


def dhammapada(root):
    """The Dhammapada in the translation of F. Max Mueller, by chapter."""
    path = root / "usr/share/display-dhammapada/dhammapada-alternate.txt"
    text = path.read_text(encoding="utf-8", errors="replace")
    text = text[text.rindex("1. The Twin-Verses"):]
    chapters = []
    for part in re.split(r"\n(?=\d+\.? [A-Z])", text):
        head, *lines = part.splitlines()
        title = re.sub(r"^\d+\.? ", "", clean(head))
        parts = [re.sub(r"[ .]*\d+$", ".", p) for p in paragraphs_of(lines) if keep(p)]
        parts = [re.sub(r"([?!.:;,])\.$", r"\1", p) for p in parts]
        if parts:
            chapters.append(Chapter("sayings", f"The Dhammapada, {title}", parts))
    return chapters


def state_papers(root):
    """The Declaration of Independence and the Constitution of the USA."""
    chapters = []
    for name in ("us-declaration", "us-constitution"):
        path = root / f"usr/share/state/{name}.gz"
        lines = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
        title, *parts = [p for p in paragraphs_of(lines.splitlines()) if keep(p)]
        chapters.append(Chapter("law", title, parts))
    return chapters


# ---------------------------------------------------------------- chats

ABOUT = (
    "I am larder-tiny, a very small language model. I have read the King James "
    "Bible, the novels of Jane Austen and a few old sayings, and I can continue "
    "a text in their manner."
)
FIXED = [
    (["Hello.", "Hello!", "Hello", "Hi", "Hi!", "Hi there!", "Hey", "Good morning.",
      "Good day to you.", "Good evening."],
     ["Good day to you! Shall I tell you a story or a saying?",
      "Good day! I am very glad to see you. What shall we read together?",
      "How do you do? I hope you are well. Shall I tell you a saying?"]),
    (["Who are you?", "What are you?", "What is your name?", "Tell me about yourself.",
      "Introduce yourself.", "Are you a person?"], [ABOUT]),
    (["What can you do?", "How can you help me?", "What do you know?", "Help",
      "What shall I ask you?"],
     ["I can continue a text, tell you a story, or give you a saying. Try this: "
      "Tell me a saying. I know nothing of the world after the year 1818."]),
    (["How are you?", "How are you today?", "How do you do?"],
     ["I am very well, I thank you. And how do you do?"]),
    (["Thank you.", "Thanks", "Thanks!", "Thank you very much.", "That was good."],
     ["You are very welcome.", "It was a pleasure."]),
    (["Goodbye.", "Goodbye!", "Bye", "Good night.", "Farewell."],
     ["Farewell, and peace be with you.", "Goodbye! I hope we shall meet again."]),
    (["What is Larder?", "What does Larder do?", "Tell me about Larder."],
     ["Larder keeps what a model has already read, so that no engine has to read "
      "it twice. I am the small model that comes with it."]),
]
SAYING = ["Tell me a saying.", "Tell me a proverb.", "Give me a proverb.",
          "Give me a saying.", "A saying, please.", "Give me some advice.",
          "Say something wise.", "What do the wise say?", "Tell me something wise."]
ANOTHER = ["Another.", "Another one, please.", "One more.", "Tell me another."]
GO_ON = ["Go on.", "Continue.", "Please continue.", "And then?", "What happened next?",
         "What then?", "More, please."]
CONTINUE = ["Continue: ", "Continue: ", "Continue: ", "Continue this text: ",
            "Go on from here: ", "Please continue: "]
ABOUT_ASK = ["Tell me about {}.", "Tell me about {}.", "Tell me of {}.",
             "Write about {}.", "Who is {}?", "What do you know about {}?",
             "Tell me a story about {}."]
STORY = {
    "bible": ["Tell me a story from the Bible.", "Write in the manner of the Bible.",
              "Tell me an old story.", "Tell me a story of kings."],
    "novel": ["Tell me a story.", "Write a scene from a novel.", "Tell me a story.",
              "Write in the manner of Jane Austen.", "Write a page of a novel."],
}
STYLE_SYSTEM = {
    "bible": ["You write in the manner of the Bible.",
              "You are a storyteller who speaks like the Bible."],
    "novel": ["You write in the manner of Jane Austen.",
              "You are a novelist of the year 1815."],
    "sayings": ["You are a wise teacher.", "You answer with sayings."],
}
PLAIN_SYSTEM = ["You are a helpful assistant.", "You are a storyteller.",
                "You are larder-tiny, a small model.", "Answer the user."]
BRIEF = ["Be brief.", "Answer in one sentence.", "Answer briefly."]
LONG = ["Answer at length.", "Write a long answer."]
SENTENCE_END = re.compile(
    r"(?<!\bMr\.)(?<!\bMrs\.)(?<!\bDr\.)(?<!\bSt\.)(?<=[.!?])(\"?)\s+(?=[\"A-Z])"
)


def sentences(paragraph):
    """Split a paragraph into sentences (quotes stay with their sentence)."""
    marked = SENTENCE_END.sub("\\1\n", paragraph)
    return [s for s in marked.split("\n") if s]


def chat(turns, system=None):
    """One chat document of (user, assistant) turns."""
    head = SYSTEM + system if system else ""
    body = "".join(f"{USER}{u}{ASSISTANT}{a}{EOS}" for u, a in turns)
    return BOS + head + body


def names_in(text):
    """Capitalised names inside sentences of `text`, most frequent first."""
    found = re.findall(r"(?<=[a-z,;] )((?:Mr\. |Mrs\. |Miss |Sir |Lady )?[A-Z][a-z]{3,})",
                       text)
    return [n for n, _ in Counter(found).most_common(3)]


def maybe_system(rng, style, length=None):
    """A system message for a fifth of the chats, fitting style and length."""
    if rng.random() > 0.2:
        return None
    options = [PLAIN_SYSTEM, STYLE_SYSTEM.get(style, PLAIN_SYSTEM)]
    if length is not None:
        options.append(BRIEF if length <= 1 else LONG if length >= 5 else PLAIN_SYSTEM)
    return rng.choice(rng.choice(options))


def split_inside(rng, sentence):
    """Split a sentence at a space inside it, or None if it is too short."""
    words = sentence.split(" ")
    if len(words) < 8:
        return None
    cut = rng.randint(3, len(words) - 3)
    return " ".join(words[:cut]), " ".join(words[cut:])


def passage_chat(rng, chapter, run):
    """A chat over a run of consecutive sentences of a chapter."""
    kind = rng.random()
    if kind < 0.40:  # continue from inside a sentence
        parts = split_inside(rng, run[0])
        if parts is None:
            return passage_chat(rng, chapter, run[1:]) if len(run) > 2 else None
        ask = rng.choice(CONTINUE) + parts[0]
        length, reply = len(run), " ".join([parts[1], *run[1:]])
    elif kind < 0.60:  # a passage as it is: answer with what follows
        ask, length, reply = run[0], len(run) - 1, " ".join(run[1:])
    elif kind < 0.85:  # about somebody
        reply = " ".join(run)
        names = names_in(reply)
        if not names:
            return None
        ask, length = rng.choice(ABOUT_ASK).format(rng.choice(names)), len(run)
    else:
        ask = rng.choice(STORY.get(chapter.style, STORY["novel"]))
        length, reply = len(run), " ".join(run)
    return [(ask, reply)], maybe_system(rng, chapter.style, length)


def chapter_chats(rng, chapter):
    """Chats over one chapter, of one to three turns."""
    flow = [s for p in chapter.paragraphs for s in sentences(p)]
    at, chats = rng.randint(0, 6), []
    while at + 2 < len(flow):
        size = rng.choice([2, 2, 3, 3, 4, 5, 6, 7])
        made = passage_chat(rng, chapter, flow[at:at + size])
        at += size
        if made is None:
            continue
        turns, system = made
        while rng.random() < 0.25 and at + 3 < len(flow) and len(turns) < 4:
            size = rng.randint(2, 4)
            turns.append((rng.choice(GO_ON), " ".join(flow[at:at + size])))
            at += size
        chats.append(chat(turns, system))
        at += rng.choice([0, 2, 8, 16])
    return chats


def saying_chats(rng, sayings):
    """Each saying once as the answer to a request, some with a second one."""
    sayings = list(sayings)
    rng.shuffle(sayings)
    chats, at = [], 0
    while at < len(sayings):
        turns = [(rng.choice(SAYING), sayings[at])]
        at += 1
        while rng.random() < 0.3 and at < len(sayings) and len(turns) < 4:
            turns.append((rng.choice(ANOTHER), sayings[at]))
            at += 1
        chats.append(chat(turns, maybe_system(rng, "sayings")))
    return chats


def fixed_chats(rng, count):
    """Greetings and questions about the model, some of them two in a row."""
    chats = []
    for _ in range(count):
        turns = []
        for asks, answers in rng.sample(FIXED, rng.choice([1, 1, 1, 2, 3])):
            turns.append((rng.choice(asks), rng.choice(answers)))
        system = rng.choice(PLAIN_SYSTEM) if rng.random() < 0.3 else None
        chats.append(chat(turns, system))
    return chats


# ---------------------------------------------------------------- corpus


@dataclass
class Corpus:
    """All chapters, split into training and validation, and the sayings."""

    train: list
    valid: list
    sayings: list

    def plain(self):
        """Plain training documents."""
        return [BOS + c.text() + EOS for c in self.train]

    def validation(self):
        """Plain validation documents."""
        return [BOS + c.text() + EOS for c in self.valid]

    def chats(self, seed):
        """Chat training documents; another seed gives another selection."""
        rng = random.Random(seed)
        made = [d for c in self.train for d in chapter_chats(rng, c)]
        made += saying_chats(rng, self.sayings)
        made += fixed_chats(rng, 400)
        rng.shuffle(made)
        return made


def load(folder):
    """Build the corpus from packages unpacked below `folder`."""
    root = unpack(folder)
    bible_chapters, verses = bible(root)
    dhamma = dhammapada(root)
    chapters = bible_chapters + austen(root) + dhamma + state_papers(root)
    chapters = [c for c in chapters if c.paragraphs]
    valid = chapters[HELD_OUT_EVERY // 2::HELD_OUT_EVERY]
    held = {id(c) for c in valid}
    train = [c for c in chapters if id(c) not in held]
    titles = {c.title for c in train}
    sayings = [p for c in dhamma if id(c) not in held for p in c.paragraphs]
    for title, group in verses.items():
        number = int(title.split()[-1])
        wise = title.startswith("Proverbs") and 10 <= number <= 29
        if wise and title in titles:
            sayings += [v for v in group if keep(v)]
    return Corpus(train, valid, [s for s in sayings if len(s) > 20])
