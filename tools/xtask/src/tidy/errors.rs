//! The rule `error-code`: codes of operator-visible errors and their pages in `docs/errors/`.

use super::Violation;
use crate::source::SourceFile;
use std::collections::{BTreeMap, BTreeSet};

const FOLDER: &str = "docs/errors/";
const INDEX: &str = "docs/errors/README.md";
const PREFIX: &str = "LRD";
const DIGITS: usize = 4;
const OWN_SOURCES: &str = "tools/xtask/";

type Place = (String, usize);

/// Checks that sources, pages and index name the same codes. A code without a page, or a page
/// without a message, is a violation.
pub fn check(files: &[SourceFile], found: &mut Vec<Violation>) {
    let mentions = mentions_in_sources(files);
    let pages: BTreeMap<&str, &SourceFile> = files
        .iter()
        .filter(|file| file.is_markdown() && file.path.starts_with(FOLDER) && file.path != INDEX)
        .map(|file| (file.path.as_str(), file))
        .collect();
    let rows = rows(files.iter().find(|file| file.path == INDEX));

    for (code, place) in &mentions {
        if !pages.contains_key(page_path(code).as_str()) {
            let fix = format!("write {} with the sections Meaning, Cause and Action", page_path(code));
            found.push(violation(place, format!("the error code {code} has no page"), fix));
        }
        if !rows.contains_key(code) {
            let fix = format!("add the row `| [{code}]({code}.md) | message |` to {INDEX}");
            found.push(violation(place, format!("the error code {code} has no row in {INDEX}"), fix));
        }
    }
    let emitted = emitted_codes(files);
    for (path, page) in &pages {
        check_page(path, page, &emitted, found);
    }
    for (code, lines) in &rows {
        let place = |line: &usize| (INDEX.to_string(), *line);
        for line in &lines[1..] {
            let fix = "keep one row for each code".to_string();
            found.push(violation(&place(line), format!("{code} has a second row"), fix));
        }
        if !pages.contains_key(page_path(code).as_str()) && !mentions.contains_key(code) {
            let fix = "remove the row, or add the code to its message and write its page".to_string();
            found.push(violation(&place(&lines[0]), format!("{code} has a row, but no page and no message"), fix));
        }
    }
}

/// Checks that a page's name is a code, that its title repeats the code, and that a message carries
/// it.
fn check_page(path: &str, page: &SourceFile, emitted: &BTreeSet<String>, found: &mut Vec<Violation>) {
    let place = (path.to_string(), 1);
    let name = path.strip_prefix(FOLDER).and_then(|name| name.strip_suffix(".md")).unwrap_or(path);
    if codes(name) != [name] {
        let fix = format!("name the page after its code, as in {FOLDER}LRD0102.md");
        found.push(violation(&place, "this file is not named after an error code".to_string(), fix));
        return;
    }
    let title = format!("# {name}: ");
    if !page.text.starts_with(&title) {
        let fix = format!("begin the page with `{title}` and a short name of the error");
        found.push(violation(&place, "the title does not name the code of the page".to_string(), fix));
    }
    if !emitted.contains(name) {
        let fix = format!("end a message with ` [{name}]`, or remove the page and its row in {INDEX}");
        found.push(violation(&place, format!("no message carries {name}"), fix));
    }
}

fn mentions_in_sources(files: &[SourceFile]) -> BTreeMap<String, Place> {
    let mut first = BTreeMap::new();
    for file in rust_files(files) {
        for (index, line) in file.text.lines().enumerate() {
            for code in codes(line) {
                first.entry(code.to_string()).or_insert_with(|| (file.path.clone(), index + 1));
            }
        }
    }
    first
}

/// Codes in the Rust files other than tests. A test that expects a code does not emit it, so it
/// does not justify a page.
fn emitted_codes(files: &[SourceFile]) -> BTreeSet<String> {
    let emitting = rust_files(files).filter(|file| !file.path.split('/').any(|folder| folder == "tests"));
    emitting.flat_map(|file| codes(&file.text)).map(str::to_string).collect()
}

fn rust_files(files: &[SourceFile]) -> impl Iterator<Item = &SourceFile> {
    files.iter().filter(|file| file.is_rust() && !file.path.starts_with(OWN_SOURCES))
}

fn rows(index: Option<&SourceFile>) -> BTreeMap<String, Vec<usize>> {
    let mut rows: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (at, line) in index.map(|file| file.text.as_str()).unwrap_or("").lines().enumerate() {
        if let Some(code) = codes(line).first()
            && line.starts_with(&format!("| [{code}]({code}.md) |"))
        {
            rows.entry(code.to_string()).or_default().push(at + 1);
        }
    }
    rows
}

/// Codes in `text`, in order: the prefix and exactly four digits, not part of a longer word.
fn codes(text: &str) -> Vec<&str> {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    text.split(|c: char| !is_word(c))
        .filter(|word| {
            word.strip_prefix(PREFIX)
                .is_some_and(|number| number.len() == DIGITS && number.bytes().all(|byte| byte.is_ascii_digit()))
        })
        .collect()
}

fn page_path(code: &str) -> String {
    format!("{FOLDER}{code}.md")
}

fn violation((path, line): &Place, message: String, fix: String) -> Violation {
    Violation { path: path.clone(), line: *line, rule: "error-code", message, fix }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: (&str, &str) = ("store/a.rs", "\n#[error(\"cannot listen [LRD0102]\")]\n");
    const PAGE: (&str, &str) = ("docs/errors/LRD0102.md", "# LRD0102: cannot listen\n");
    const ROW: (&str, &str) = (INDEX, "| [LRD0102](LRD0102.md) | cannot listen |\n");

    fn violations(files: &[(&str, &str)]) -> Vec<String> {
        let files: Vec<SourceFile> =
            files.iter().map(|(path, text)| SourceFile { path: path.to_string(), text: text.to_string() }).collect();
        let mut found = Vec::new();
        check(&files, &mut found);
        assert!(found.iter().all(|violation| violation.rule == "error-code" && !violation.fix.is_empty()));
        found.iter().map(|v| format!("{}:{} {}", v.path, v.line, v.message)).collect()
    }

    #[test]
    fn code_with_page_and_row_is_accepted() {
        assert!(violations(&[SOURCE, PAGE, ROW]).is_empty());
        assert!(violations(&[]).is_empty());
    }

    #[test]
    fn code_without_page_or_row_is_found() {
        assert_eq!(violations(&[SOURCE, ROW]), ["store/a.rs:2 the error code LRD0102 has no page"]);
        assert_eq!(
            violations(&[SOURCE, PAGE]),
            ["store/a.rs:2 the error code LRD0102 has no row in docs/errors/README.md"]
        );
    }

    #[test]
    fn page_of_a_code_without_a_message_is_found() {
        let expected = ["docs/errors/LRD0102.md:1 no message carries LRD0102"];
        assert_eq!(violations(&[PAGE, ROW]), expected);
        let test = ("store/tests/a.rs", "assert!(text.contains(\"LRD0102\"));");
        assert_eq!(violations(&[test, PAGE, ROW]), expected);
    }

    #[test]
    fn page_with_another_name_or_title_is_found() {
        let other = ("docs/errors/listen.md", "# LRD0102: cannot listen\n");
        assert_eq!(
            violations(&[SOURCE, PAGE, ROW, other]),
            ["docs/errors/listen.md:1 this file is not named after an error code"]
        );
        let untitled = ("docs/errors/LRD0102.md", "# LRD0103: cannot listen\n");
        assert_eq!(
            violations(&[SOURCE, untitled, ROW]),
            ["docs/errors/LRD0102.md:1 the title does not name the code of the page"]
        );
    }

    #[test]
    fn second_row_and_row_without_page_are_found() {
        let twice = format!("{0}{0}", ROW.1);
        assert_eq!(violations(&[SOURCE, PAGE, (INDEX, &twice)]), ["docs/errors/README.md:2 LRD0102 has a second row"]);
        assert_eq!(violations(&[ROW]), ["docs/errors/README.md:1 LRD0102 has a row, but no page and no message"]);
    }

    #[test]
    fn only_whole_words_with_four_digits_are_codes() {
        assert_eq!(codes("x [LRD0102], LRD010 LRD01020 XLRD0102 LRD_0102 `LRD0601`"), ["LRD0102", "LRD0601"]);
    }
}
