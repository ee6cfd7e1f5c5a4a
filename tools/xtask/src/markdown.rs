//! Sentences, links and headings of Markdown text.
//!
//! Fenced code, tables, headings and HTML are not prose. Every paragraph and every list item is a
//! unit of its own: a sentence never reaches across units.

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unit {
    pub line: usize,
    pub text: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sentence {
    pub line: usize,
    pub text: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    pub line: usize,
    pub target: String,
}

/// Splits the prose of `lines`, given with their line numbers, into units. Fenced code, tables and
/// headings are no prose.
pub fn units<'a>(lines: impl Iterator<Item = (usize, &'a str)>) -> Vec<Unit> {
    let mut units: Vec<Unit> = Vec::new();
    let mut fence: Option<&str> = None;
    let mut open = false;
    for (line, raw) in lines {
        let text = raw.trim().trim_start_matches('>').trim_start();
        if let Some(marker) = fence_marker(text) {
            open = false;
            match fence {
                Some(begun) if marker == begun => fence = None,
                None => fence = Some(marker),
                Some(_) => {}
            }
            continue;
        }
        let indented_code = !open && raw.starts_with("    ") && list_item(text).is_none();
        if fence.is_some() || indented_code || !is_prose(text) {
            open = false;
            continue;
        }
        if let Some(item) = list_item(text) {
            units.push(Unit { line, text: item.to_string() });
            open = true;
            continue;
        }
        match units.last_mut() {
            Some(unit) if open => {
                unit.text.push(' ');
                unit.text.push_str(text);
            }
            _ => units.push(Unit { line, text: text.to_string() }),
        }
        open = true;
    }
    units
}

fn fence_marker(text: &str) -> Option<&'static str> {
    ["```", "~~~"].into_iter().find(|marker| text.starts_with(marker))
}

fn is_prose(text: &str) -> bool {
    let rule = text.len() >= 3 && text.chars().all(|c| matches!(c, '-' | '*' | '_' | '='));
    let reference = text.starts_with('[') && text.contains("]: ");
    !text.is_empty() && !rule && !reference && !text.starts_with(['#', '|', '<'])
}

fn list_item(text: &str) -> Option<&str> {
    if let Some(item) = ["- ", "* ", "+ "].iter().find_map(|marker| text.strip_prefix(marker)) {
        return Some(item.trim_start_matches("[ ] ").trim_start_matches("[x] "));
    }
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let number = digits > 0 && digits <= 3;
    number.then(|| text[digits..].strip_prefix(". ").or_else(|| text[digits..].strip_prefix(") "))).flatten()
}

const ABBREVIATIONS: &[&str] = &["e.g.", "i.e.", "etc.", "cf.", "vs.", "approx.", "no.", "incl."];

/// Splits units into sentences. A dot ends a sentence unless an abbreviation carries it or the next
/// word begins in lower case.
pub fn sentences(units: &[Unit]) -> Vec<Sentence> {
    let mut found = Vec::new();
    for unit in units {
        let mut words: Vec<&str> = Vec::new();
        let mut all = unit.text.split_whitespace().peekable();
        while let Some(word) = all.next() {
            words.push(word);
            if all.peek().is_none_or(|next| ends_sentence(word, next)) {
                found.push(Sentence { line: unit.line, text: words.join(" ") });
                words.clear();
            }
        }
    }
    found.retain(|sentence| words(&sentence.text) > 0);
    found
}

fn ends_sentence(word: &str, next: &str) -> bool {
    let bare = word.trim_end_matches(['*', '_', '"', '”', ')', '`', '’']);
    if !bare.ends_with(['.', '!', '?']) || ABBREVIATIONS.contains(&bare.to_lowercase().trim_start_matches('(')) {
        return false;
    }
    // A lower-case word goes on with the sentence, unless it is code.
    next.starts_with(|c: char| !c.is_lowercase())
}

pub fn words(text: &str) -> usize {
    text.split_whitespace().filter(|word| word.chars().any(char::is_alphanumeric)).count()
}

pub fn count_words(text: &str, wanted: &[&str]) -> usize {
    text.split(|c: char| !c.is_alphanumeric() && c != '_')
        .filter(|word| wanted.iter().any(|wanted| word.eq_ignore_ascii_case(wanted)))
        .count()
}

pub fn without_code(text: &str) -> String {
    text.split('`').step_by(2).collect::<Vec<_>>().join(" ")
}

pub fn links(text: &str) -> Vec<Link> {
    let mut links = Vec::new();
    for (line, raw) in outside_fences(text) {
        let plain = without_code(raw);
        let mut rest = plain.as_str();
        while let Some(at) = rest.find("](") {
            rest = &rest[at + 2..];
            let end = rest.find(')').unwrap_or(rest.len());
            let target = rest[..end].split_whitespace().next().unwrap_or("");
            links.push(Link { line, target: target.trim_matches(['<', '>']).to_string() });
            rest = &rest[end..];
        }
        let definition = plain.trim_start();
        if definition.starts_with('[')
            && let Some((_, target)) = definition.split_once("]: ")
        {
            let target = target.split_whitespace().next().unwrap_or("").to_string();
            links.push(Link { line, target });
        }
    }
    links
}

/// Anchors of the headings, as GitHub forms them: lower case, without punctuation, and with a
/// number if the heading repeats.
pub fn anchors(text: &str) -> Vec<String> {
    let mut anchors: Vec<String> = Vec::new();
    for (_, raw) in outside_fences(text) {
        let heading = raw.trim_start_matches('#');
        if heading.len() == raw.len() || !heading.starts_with(' ') {
            continue;
        }
        let slug: String = heading
            .trim()
            .to_lowercase()
            .chars()
            .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
            .map(|c| if c == ' ' { '-' } else { c })
            .collect();
        let repeats = anchors.iter().filter(|anchor| **anchor == slug).count();
        anchors.push(if repeats == 0 { slug } else { format!("{slug}-{repeats}") });
    }
    anchors
}

pub fn outside_fences(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fence: Option<&str> = None;
    text.lines().enumerate().filter_map(move |(index, line)| {
        if let Some(marker) = fence_marker(line.trim()) {
            match fence {
                Some(begun) if begun == marker => fence = None,
                None => fence = Some(marker),
                Some(_) => {}
            }
            return None;
        }
        fence.is_none().then_some((index + 1, line))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn units_of(text: &str) -> Vec<Unit> {
        units(text.lines().enumerate().map(|(index, line)| (index + 1, line)))
    }

    #[test]
    fn code_tables_and_headings_are_no_prose() {
        let text = "# Title\n\nOne\ntwo.\n\n```sh\nnot this\n```\n| a | b |\n\n    indented code\n\n> quoted\n";
        let found: Vec<_> = units_of(text).into_iter().map(|unit| (unit.line, unit.text)).collect();
        assert_eq!(found, [(3, "One two.".to_string()), (13, "quoted".to_string())]);
    }

    #[test]
    fn list_items_are_units_of_their_own() {
        let found = units_of("Intro:\n- one\n  goes on\n- two\n1. three\n10) four\n");
        let texts: Vec<_> = found.iter().map(|unit| unit.text.as_str()).collect();
        assert_eq!(texts, ["Intro:", "one goes on", "two", "three", "four"]);
    }

    #[test]
    fn sentences_end_at_full_stops_before_capitals() {
        let text = "Version 0.1 runs, e.g. Here. It stops (really). `up` starts. **Bold.** Next one? yes. i.e. no";
        let found = sentences(&units_of(text));
        let texts: Vec<_> = found.iter().map(|sentence| sentence.text.as_str()).collect();
        assert_eq!(
            texts,
            [
                "Version 0.1 runs, e.g. Here.",
                "It stops (really).",
                "`up` starts.",
                "**Bold.**",
                "Next one? yes. i.e. no"
            ]
        );
    }

    #[test]
    fn words_need_a_letter_or_a_digit() {
        assert_eq!(words("a - b → 3 `code x`"), 5);
        assert_eq!(count_words("What, whatever; (who) what_is", &["what", "who"]), 2);
    }

    #[test]
    fn links_and_anchors_are_found_outside_code() {
        let text = "[a](x.md#one) `[b](no.md)` ![c](<y.png> \"t\")\n```\n[d](no.md)\n```\n[e]: z.md\n";
        let targets: Vec<_> = links(text).into_iter().map(|link| link.target).collect();
        assert_eq!(targets, ["x.md#one", "y.png", "z.md"]);
        assert_eq!(anchors("# A `b`: C\n## A b c\n#no\n"), ["a-b-c", "a-b-c-1"]);
    }
}
