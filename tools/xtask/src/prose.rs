//! Measures the language of documents and comments against the targets of the style guide.

use crate::comments::{Block, blocks};
use crate::lexer::{Kind, lex};
use crate::markdown::{self, Sentence, Unit};
use crate::rust::functions;
use crate::source::SourceFile;
use std::fmt::Write;

const VAGUE: &[&str] = &["what", "who"];
pub const OPENERS: &[&str] = &["what", "whether", "how", "where", "who", "of", "whose", "which"];
const LONG_SENTENCE: usize = 30;
pub const COMMENT_COLUMNS: usize = 100;
/// Columns of a code line, as rustfmt.toml sets them. Comments had this limit once, so the report
/// still counts lines beyond it.
const CODE_COLUMNS: usize = 120;

#[derive(Debug, Clone, Copy)]
enum Target {
    AtMost(f64),
    AtLeast(f64),
    None,
}

impl Target {
    fn is_met(self, value: f64) -> bool {
        match self {
            Target::AtMost(bound) => value <= bound,
            Target::AtLeast(bound) => value >= bound,
            Target::None => true,
        }
    }

    fn text(self) -> String {
        match self {
            Target::AtMost(bound) => format!("≤ {bound}"),
            Target::AtLeast(bound) => format!("≥ {bound}"),
            Target::None => "–".to_string(),
        }
    }
}

/// A place that a measurement counts against the text. `--list` prints these places, the largest
/// weight first.
#[derive(Debug, Clone)]
pub struct Offender {
    pub kind: &'static str,
    pub path: String,
    pub line: usize,
    pub detail: String,
    weight: usize,
}

#[derive(Debug)]
struct Document {
    path: String,
    words: usize,
    sentences: usize,
    long_sentences: usize,
    longest_paragraph: usize,
    vague: usize,
}

#[derive(Debug, Default)]
struct Code {
    lines: usize,
    comment_words: usize,
    comment_vague: usize,
    comment_sentences: usize,
    comment_sentence_words: usize,
    doc_comments: usize,
    /// Blocks of `///` and their lines: the header of a module would hide one-line comments of its
    /// items.
    item_docs: usize,
    item_doc_lines: usize,
    header_lines: usize,
    bad_openers: usize,
    wide: usize,
    very_wide: usize,
    inline_blocks: usize,
    tests: usize,
    bad_tests: usize,
}

#[derive(Debug)]
pub struct Report {
    documents: Vec<Document>,
    code: Code,
    offenders: Vec<Offender>,
}

struct Row {
    name: String,
    value: f64,
    unit: &'static str,
    target: Target,
    kind: &'static str,
}

pub fn measure(files: &[SourceFile]) -> Report {
    let mut report = Report { documents: Vec::new(), code: Code::default(), offenders: Vec::new() };
    for file in files {
        if file.is_markdown() {
            measure_document(file, &mut report);
        } else if file.is_rust() {
            measure_rust(file, &mut report);
        }
    }
    report.offenders.sort_by(|a, b| b.weight.cmp(&a.weight).then_with(|| (&a.path, a.line).cmp(&(&b.path, b.line))));
    report
}

fn measure_document(file: &SourceFile, report: &mut Report) {
    let units = markdown::units(file.text.lines().enumerate().map(|(index, line)| (index + 1, line)));
    let sentences = markdown::sentences(&units);
    let mut document = Document {
        path: file.path.clone(),
        words: 0,
        sentences: sentences.len(),
        long_sentences: 0,
        longest_paragraph: 0,
        vague: 0,
    };
    for sentence in &sentences {
        let words = markdown::words(&sentence.text);
        document.words += words;
        if words > LONG_SENTENCE {
            document.long_sentences += 1;
            report.offenders.push(long_sentence(&file.path, sentence, words));
        }
    }
    for unit in &units {
        let words = markdown::words(&unit.text);
        document.longest_paragraph = document.longest_paragraph.max(words);
        if words > PARAGRAPH_WORDS {
            let detail = format!("{words} words: {}", start_of(&unit.text));
            report.offenders.push(offender("paragraphs", &file.path, unit.line, detail, words));
        }
        document.vague += note_vague(&file.path, unit, &mut report.offenders);
    }
    report.documents.push(document);
}

const PARAGRAPH_WORDS: usize = 90;

fn measure_rust(file: &SourceFile, report: &mut Report) {
    let tokens = lex(&file.text);
    let Report { code, offenders, .. } = report;
    code.lines += file.text.lines().count();
    for block in blocks(&tokens) {
        measure_block(file, &block, code, offenders);
    }
    // Lines as they stand in the file: a line with a trailing comment is code.
    let lines: Vec<&str> = file.text.lines().collect();
    for token in tokens.iter().filter(|token| token.is_comment() && token.leads_line) {
        for line in token.line..=token.last_line() {
            let columns = lines.get(line - 1).map_or(0, |text| text.chars().count());
            code.very_wide += usize::from(columns > CODE_COLUMNS);
            if columns > COMMENT_COLUMNS {
                code.wide += 1;
                offenders.push(offender("width", &file.path, line, format!("{columns} columns"), columns));
            }
        }
    }
    for test in functions(&tokens).iter().filter(|function| function.is_test) {
        code.tests += 1;
        if is_vague_test_name(&test.name) {
            code.bad_tests += 1;
            offenders.push(offender("tests", &file.path, test.line, test.name.clone(), 1));
        }
    }
}

pub fn is_vague_test_name(name: &str) -> bool {
    ["what_", "who_", "whoever_", "whatever_", "whose_"].iter().any(|prefix| name.starts_with(prefix))
}

fn measure_block(file: &SourceFile, block: &Block, code: &mut Code, offenders: &mut Vec<Offender>) {
    let units = markdown::units(block.lines.iter().map(|line| (line.line, line.text.as_str())));
    for sentence in markdown::sentences(&units) {
        let words = markdown::words(&sentence.text);
        code.comment_words += words;
        code.comment_sentences += 1;
        code.comment_sentence_words += words;
        if words > LONG_SENTENCE {
            offenders.push(long_sentence(&file.path, &sentence, words));
        }
    }
    for unit in &units {
        code.comment_vague += note_vague(&file.path, unit, offenders);
    }
    if !block.is_doc() {
        code.inline_blocks += 1;
        return;
    }
    code.doc_comments += 1;
    if block.kind == Kind::Doc {
        code.item_docs += 1;
        code.item_doc_lines += block.lines.len();
    } else {
        code.header_lines += block.lines.len();
    }
    if block.lines.len() == 1 && block.kind == Kind::Doc {
        let detail = start_of(&block.lines[0].text);
        offenders.push(offender("one-line", &file.path, block.first_line(), detail, 1));
    }
    if block.opener().is_some_and(|word| OPENERS.contains(&word.as_str())) {
        code.bad_openers += 1;
        let detail = block.lines.first().map_or(String::new(), |line| start_of(&line.text));
        offenders.push(offender("openers", &file.path, block.first_line(), detail, 1));
    }
}

fn note_vague(path: &str, unit: &Unit, offenders: &mut Vec<Offender>) -> usize {
    let text = markdown::without_code(&unit.text);
    let count = markdown::count_words(&text, VAGUE);
    if count > 0 {
        let detail = format!("{count}×: {}", start_of(&unit.text));
        offenders.push(offender("words", path, unit.line, detail, count));
    }
    count
}

fn long_sentence(path: &str, sentence: &Sentence, words: usize) -> Offender {
    let detail = format!("{words} words: {}", start_of(&sentence.text));
    offender("sentences", path, sentence.line, detail, words)
}

fn offender(kind: &'static str, path: &str, line: usize, detail: String, weight: usize) -> Offender {
    Offender { kind, path: path.to_string(), line, detail, weight }
}

fn start_of(text: &str) -> String {
    let mut start: String = text.chars().take(80).collect();
    if start.len() < text.len() {
        start.push('…');
    }
    start
}

fn per(count: usize, total: usize, scale: f64) -> f64 {
    if total == 0 { 0.0 } else { count as f64 * scale / total as f64 }
}

impl Report {
    pub const KINDS: &[&str] = &["sentences", "paragraphs", "words", "openers", "tests", "width", "one-line"];

    pub fn offenders(&self) -> &[Offender] {
        &self.offenders
    }

    fn rows(&self) -> Vec<Row> {
        let code = &self.code;
        let document_words: usize = self.documents.iter().map(|document| document.words).sum();
        let vague = code.comment_vague + self.documents.iter().map(|document| document.vague).sum::<usize>();
        let row = |name: &str, value, unit, target, kind| Row { name: name.to_string(), value, unit, target, kind };
        vec![
            row(
                "\"what\"/\"who\" per 1,000 words of documents and comments",
                per(vague, document_words + code.comment_words, 1000.0),
                "",
                Target::AtMost(3.0),
                "words",
            ),
            row(
                "doc comments that open with What/Whether/How/Where/Who/Of/Whose/Which",
                per(code.bad_openers, code.doc_comments, 100.0),
                " %",
                Target::AtMost(3.0),
                "openers",
            ),
            row(
                "test names that start with what_ or who_",
                per(code.bad_tests, code.tests, 100.0),
                " %",
                Target::AtMost(0.0),
                "tests",
            ),
            row("comment lines over 100 columns", code.wide as f64, "", Target::AtMost(0.0), "width"),
            row("comment lines over 120 columns", code.very_wide as f64, "", Target::AtMost(0.0), "width"),
            row(
                "lines per doc comment of an item",
                per(code.item_doc_lines, code.item_docs, 1.0),
                "",
                Target::AtLeast(1.5),
                "one-line",
            ),
            row(
                "lines per doc comment, module headers included",
                per(code.item_doc_lines + code.header_lines, code.doc_comments, 1.0),
                "",
                Target::None,
                "",
            ),
            row(
                "inline comments per 1,000 lines of Rust",
                per(code.inline_blocks, code.lines, 1000.0),
                "",
                Target::None,
                "",
            ),
            row(
                "words per sentence in comments",
                per(code.comment_sentence_words, code.comment_sentences, 1.0),
                "",
                Target::None,
                "",
            ),
        ]
    }

    fn document_rows(&self) -> Vec<Row> {
        let mut rows = Vec::new();
        for document in &self.documents {
            let row = |name: &str, value, unit, bound, kind| Row {
                name: format!("{}: {name}", document.path),
                value,
                unit,
                target: Target::AtMost(bound),
                kind,
            };
            rows.push(row("words per sentence", document.words_per_sentence(), "", 17.0, "sentences"));
            rows.push(row("sentences over 30 words", document.long_share(), " %", 5.0, "sentences"));
            let longest = document.longest_paragraph as f64;
            rows.push(row("longest paragraph, words", longest, "", PARAGRAPH_WORDS as f64, "paragraphs"));
        }
        rows
    }

    pub fn tables(&self) -> String {
        let mut out = String::new();
        let widest = self.documents.iter().map(|document| document.path.len()).max().unwrap_or(0).max(8);
        let _ = writeln!(
            out,
            "{:<widest$}  {:>7}  {:>14}  {:>9}  {:>13}  {:>14}",
            "document", "words", "words/sentence", "over 30", "longest para.", "what+who/1000"
        );
        for document in &self.documents {
            let _ = writeln!(
                out,
                "{:<widest$}  {:>7}  {:>14.1}  {:>7.1} %  {:>13}  {:>14.1}",
                document.path,
                document.words,
                document.words_per_sentence(),
                document.long_share(),
                document.longest_paragraph,
                per(document.vague, document.words, 1000.0),
            );
        }
        let _ = writeln!(out, "{:<widest$}  {:>7}  {:>14}  {:>9}  {:>13}\n", "target", "", "≤ 17", "≤ 5 %", "≤ 90");
        let rows = self.rows();
        let widest = rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(0);
        for row in &rows {
            let mark = if row.target.is_met(row.value) { "" } else { "  missed" };
            let value = format!("{}{}", figure(row.value), row.unit);
            let _ = writeln!(out, "{:<widest$}  {value:>8}  {:>6}{mark}", row.name, row.target.text());
        }
        let _ = writeln!(
            out,
            "\n{} lines of Rust, {} doc comments of items with {} lines, {} lines of module headers, {} other comments, \
                {} tests",
            self.code.lines,
            self.code.item_docs,
            self.code.item_doc_lines,
            self.code.header_lines,
            self.code.inline_blocks,
            self.code.tests
        );
        out
    }

    /// Names of the missed targets, each with the kind of its offenders. Empty if the tree meets
    /// every target.
    pub fn missed(&self) -> Vec<(String, &'static str)> {
        self.document_rows()
            .into_iter()
            .chain(self.rows())
            .filter(|row| !row.target.is_met(row.value))
            .map(|row| {
                let line = format!("{}: {}{}, target {}", row.name, figure(row.value), row.unit, row.target.text());
                (line, row.kind)
            })
            .collect()
    }
}

fn figure(value: f64) -> String {
    if value.fract() == 0.0 {
        format!("{value:.0}")
    } else if value < 10.0 {
        format!("{value:.2}")
    } else {
        format!("{value:.1}")
    }
}

impl Document {
    fn words_per_sentence(&self) -> f64 {
        per(self.words, self.sentences, 1.0)
    }

    fn long_share(&self) -> f64 {
        per(self.long_sentences, self.sentences, 100.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> SourceFile {
        SourceFile { path: path.to_string(), text: text.to_string() }
    }

    #[test]
    fn documents_are_measured_by_sentence_and_paragraph() {
        let long = "Word ".repeat(40);
        let report = measure(&[file("a.md", &format!("# T\n\nOne two three. {long}end.\n\n- Four five.\n"))]);
        let document = &report.documents[0];
        assert_eq!((document.sentences, document.long_sentences, document.longest_paragraph), (3, 1, 44));
        assert_eq!(document.words, 46);
        assert!(report.missed().iter().any(|(line, kind)| line.contains("over 30") && *kind == "sentences"));
    }

    #[test]
    fn comments_are_measured_by_block() {
        let text = "//! Head one.\n//! Head two.\n\n/// What it is.\nfn a() {}\n\n// Why `who` not what.\nfn b() {}\n";
        let code = measure(&[file("a.rs", text)]).code;
        assert_eq!((code.doc_comments, code.item_docs, code.item_doc_lines, code.inline_blocks), (2, 1, 1, 1));
        assert_eq!((code.bad_openers, code.comment_vague, code.lines), (1, 2, 8));
    }

    #[test]
    fn wide_lines_count_only_if_they_are_comments() {
        let wide = "x".repeat(110);
        let report = measure(&[file("a.rs", &format!("// {wide}\nlet a = \"{wide}\"; // b\n/// é{}\n", &wide[..95]))]);
        assert_eq!((report.code.wide, report.code.very_wide), (1, 0));
        assert_eq!(report.offenders().iter().filter(|offender| offender.kind == "width").count(), 1);
    }

    #[test]
    fn names_of_tests_name_the_subject() {
        let report =
            measure(&[file("a.rs", "#[test]\nfn what_is_put() {}\n#[test]\nfn get_tells_what() {}\nfn who_x() {}")]);
        assert_eq!((report.code.tests, report.code.bad_tests), (2, 1));
    }

    #[test]
    fn good_text_misses_no_target() {
        let text = "/// Returns the page.\n/// Fails if the node is gone.\nfn a() {}\n";
        let report = measure(&[file("a.rs", text), file("a.md", "The node refuses the put.\n")]);
        assert_eq!(report.missed(), []);
    }
}
