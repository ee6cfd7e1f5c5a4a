//! The rules `broken-link` and `docs-index`.

use super::Violation;
use crate::markdown::{anchors, links};
use crate::source::SourceFile;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

const INDEX: &str = "docs/README.md";

/// Checks that every relative link leads to a file, a folder or a heading. Links with a scheme are
/// not checked, because CI has no network.
pub fn check_links(root: &Path, files: &[SourceFile], found: &mut Vec<Violation>) {
    let documents: Vec<&SourceFile> = files.iter().filter(|file| file.is_markdown()).collect();
    let headings: BTreeMap<&str, Vec<String>> =
        documents.iter().map(|file| (file.path.as_str(), anchors(&file.text))).collect();
    for file in &documents {
        for link in links(&file.text) {
            if link.target.contains(':') || link.target.is_empty() {
                continue;
            }
            let Some(message) = broken(root, file, &link.target, &headings) else {
                continue;
            };
            found.push(Violation {
                path: file.path.clone(),
                line: link.line,
                rule: "broken-link",
                message,
                fix: "correct the path or the heading, relative to this file".to_string(),
            });
        }
    }
}

fn broken(root: &Path, file: &SourceFile, target: &str, headings: &BTreeMap<&str, Vec<String>>) -> Option<String> {
    let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
    let path = resolve(&file.path, path);
    if !root.join(&path).exists() && !headings.contains_key(path.as_str()) {
        return Some(format!("the link `{target}` leads to no file"));
    }
    // Only headings of documents are known. GitHub has anchors in other files, too.
    let anchors = headings.get(path.as_str())?;
    let known = anchor.is_empty() || anchors.iter().any(|known| known == anchor);
    (!known).then(|| format!("the link `{target}` leads to no heading of {path}"))
}

/// `target` relative to the folder of `from`, without `.` and `..`. An empty target is `from`
/// itself.
fn resolve(from: &str, target: &str) -> String {
    if target.is_empty() {
        return from.to_string();
    }
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// Checks that `docs/README.md` leads to every page below `docs/`, directly or through the README
/// of a subfolder.
pub fn check_index(files: &[SourceFile], found: &mut Vec<Violation>) {
    let pages: BTreeMap<&str, &SourceFile> = files
        .iter()
        .filter(|file| file.is_markdown() && file.path.starts_with("docs/"))
        .map(|file| (file.path.as_str(), file))
        .collect();
    let mut reached = BTreeSet::from([INDEX.to_string()]);
    let mut open = vec![INDEX.to_string()];
    while let Some(index) = open.pop() {
        let Some(page) = pages.get(index.as_str()) else {
            continue;
        };
        for link in links(&page.text) {
            let path = resolve(&index, link.target.split('#').next().unwrap_or(""));
            let folder_index = format!("{path}/README.md");
            let path = if pages.contains_key(folder_index.as_str()) { folder_index } else { path };
            if reached.insert(path.clone()) && path.ends_with("/README.md") {
                open.push(path);
            }
        }
    }
    for path in pages.keys().filter(|path| !reached.contains(**path)) {
        found.push(Violation {
            path: path.to_string(),
            line: 1,
            rule: "docs-index",
            message: format!("no index leads from {INDEX} to this page"),
            fix: format!("link it from {INDEX} or from the README.md of its folder"),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(pages: &[(&str, &str)]) -> Vec<SourceFile> {
        pages.iter().map(|(path, text)| SourceFile { path: path.to_string(), text: text.to_string() }).collect()
    }

    fn broken_links(pages: &[(&str, &str)]) -> Vec<String> {
        let root = tempfile::tempdir().expect("a temporary folder can be made");
        std::fs::write(root.path().join("x.rs"), "").expect("a file can be written");
        let mut found = Vec::new();
        check_links(root.path(), &files(pages), &mut found);
        found
            .into_iter()
            .map(|violation| format!("{}:{} {}", violation.path, violation.line, violation.message))
            .collect()
    }

    #[test]
    fn links_to_files_and_headings_are_followed() {
        let good = "[a](../x.rs#L3) [b](b.md#two-words) [c](#one) [d](https://x.y/z) [e](mailto:a@b)\n# One\n";
        assert!(broken_links(&[("docs/a.md", good), ("docs/b.md", "## Two words\n")]).is_empty());
    }

    #[test]
    fn broken_links_are_found() {
        let found = broken_links(&[("docs/a.md", "ok\n[a](y.rs)\n[b](#none)\n")]);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].starts_with("docs/a.md:2 the link `y.rs` leads to no file"));
        assert!(found[1].contains("leads to no heading of docs/a.md"));
    }

    #[test]
    fn pages_that_no_index_leads_to_are_found() {
        let mut found = Vec::new();
        let pages = [
            ("docs/README.md", "[a](a.md) [errors](errors/)"),
            ("docs/a.md", "[c](c.md)"),
            ("docs/c.md", ""),
            ("docs/errors/README.md", "[e](E1.md)"),
            ("docs/errors/E1.md", ""),
            ("README.md", ""),
        ];
        check_index(&files(&pages), &mut found);
        let paths: Vec<_> = found.iter().map(|violation| violation.path.as_str()).collect();
        assert_eq!(paths, ["docs/c.md"]);
    }
}
