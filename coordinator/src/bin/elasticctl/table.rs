//! Columns of text, each as wide as its widest cell.

/// Text from the store as a terminal may show it: control characters, which it would obey, are spelled out.
pub(crate) fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() { shown.extend(c.escape_default()) } else { shown.push(c) }
    }
    shown
}

/// Lays out rows under a header; no space follows a line's last cell.
pub(crate) fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let rows: Vec<Vec<String>> = rows.iter().map(|row| row.iter().map(|cell| printable(cell)).collect()).collect();
    let mut widths: Vec<usize> = header.iter().map(|cell| cell.chars().count()).collect();
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let header: Vec<String> = header.iter().map(ToString::to_string).collect();
    let mut text = String::new();
    for row in std::iter::once(&header).chain(&rows) {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            let pad = width - cell.chars().count();
            line.push_str(cell);
            line.extend(std::iter::repeat_n(' ', pad + 2));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = [vec!["größer".to_owned(), "1".to_owned()], vec!["a".to_owned(), "2".to_owned()]];
        assert_eq!(table(&["JOB", "N"], &rows), "JOB     N\ngrößer  1\na       2\n");
    }

    #[test]
    fn no_cell_commands_the_terminal() {
        let rows = [vec!["\u{1b}[2Ja\u{9b}\rb".to_owned(), "x\ny".to_owned()]];
        let shown = table(&["A", "B"], &rows);
        assert!(shown.chars().all(|c| c == '\n' || !c.is_control()), "{shown:?}");
        assert_eq!(shown.lines().nth(1), Some("\\u{1b}[2Ja\\u{9b}\\rb  x\\ny"));
    }
}
