//! Plain text tables.

use crate::output::escape;
use comfy_table::{ContentArrangement, Table, presets};

const WIDTH: u16 = 120;

pub struct Column<T> {
    header: &'static str,
    wide_only: bool,
    cell: fn(&T) -> String,
}

pub fn column<T>(header: &'static str, cell: fn(&T) -> String) -> Column<T> {
    Column { header, wide_only: false, cell }
}

pub fn wide_column<T>(header: &'static str, cell: fn(&T) -> String) -> Column<T> {
    Column { header, wide_only: true, cell }
}

/// Formats a titled table, preceded by an empty line. Returns nothing if there are no rows. The
/// default view is at most 120 columns wide, the wide view as wide as its cells.
pub fn section<T>(title: &str, columns: &[Column<T>], rows: &[T], wide: bool) -> String {
    match rows.is_empty() {
        true => String::new(),
        false => format!("\n\n{title}\n{}", format(columns, rows, wide)),
    }
}

pub fn format<T>(columns: &[Column<T>], rows: &[T], wide: bool) -> String {
    let shown: Vec<&Column<T>> = columns.iter().filter(|column| wide || !column.wide_only).collect();
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    if !wide {
        table.set_content_arrangement(ContentArrangement::Dynamic).set_width(WIDTH);
    }
    table.set_header(shown.iter().map(|column| column.header));
    table.add_rows(rows.iter().map(|row| shown.iter().map(|column| escape(&(column.cell)(row))).collect::<Vec<_>>()));
    table.trim_fmt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_other_processes_cannot_forge_rows() {
        let columns = [column("NAME", |row: &String| row.clone())];
        let text = section("rows", &columns, &["evil\n\u{1b}[2Jgood  up".to_string()], true);
        assert!(text.contains(r"evil\u000a\u001b[2Jgood") && text.lines().count() == 5, "{text}");
    }

    #[test]
    fn default_view_wraps_at_120_columns_and_leaves_out_wide_columns() {
        let columns = [
            column("NAME", |row: &(String, u64)| row.0.clone()),
            column("AGAIN", |row| row.0.clone()),
            wide_column("COUNT", |row| row.1.to_string()),
        ];
        let rows = [("long name ".repeat(20), 4711)];
        let text = section("rows", &columns, &rows, false);
        assert!(text.lines().all(|line| line.chars().count() <= 120) && !text.contains("COUNT"), "{text}");
        let text = section("rows", &columns, &rows, true);
        assert!(text.contains("COUNT") && text.contains("4711"), "{text}");
        assert!(text.lines().any(|line| line.chars().count() > 400), "{text}");
        assert_eq!(section("rows", &columns, &[], true), "");
    }
}
