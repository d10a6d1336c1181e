//! Printing for people and programs: tables, colors, JSON. Names come from the cluster, and each
//! user who may create a pod chooses some: nothing in them may reach the terminal as a command.

use std::fmt::Write as _;
use std::io;
use std::io::{IsTerminal, Write};

use clap::{Args, ValueEnum};
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use crate::base::failure::{Failure, clean, is_hidden};

/// Columns at which sentences wrap.
const WIDTH: usize = 80;

/// Form of the output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// For people
    #[default]
    Table,
    /// For programs
    Json,
}

/// When to color.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum When {
    /// On a terminal, unless `NO_COLOR` is set
    #[default]
    Auto,
    /// Always
    Always,
    /// Never
    Never,
}

/// Flags about the form of the output.
#[derive(Clone, Debug, Args)]
pub(crate) struct LookArgs {
    /// Form of the output
    #[arg(short, long, value_enum, default_value_t)]
    pub(crate) output: Output,
    /// When to color
    #[arg(long, value_enum, default_value_t, value_name = "WHEN")]
    color: When,
    /// Only ASCII
    #[arg(long)]
    pub(crate) no_unicode: bool,
}

impl LookArgs {
    /// Whether to color. Any text in the variable `NO_COLOR` turns colors off.
    pub(crate) fn is_colored(&self) -> bool {
        let is_off = std::env::var_os("NO_COLOR").is_some_and(|text| !text.is_empty());
        match self.color {
            When::Always => true,
            When::Never => false,
            When::Auto => !is_off && io::stdout().is_terminal(),
        }
    }
}

/// How a state is colored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mood {
    Good,
    Odd,
    Bad,
}

/// A table with titles; columns in `right` are numbers.
pub(crate) fn table(titles: &[&str], right: &[usize], rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(titles.to_vec());
    for row in rows {
        table.add_row(row.iter().map(|cell| clean(cell)).collect::<Vec<_>>());
    }
    let last = titles.len().saturating_sub(1);
    for (at, column) in table.column_iter_mut().enumerate() {
        // Numbers are aligned to the right, so one blank before them is enough.
        let gap = if at == last { 0 } else { 1 + u16::from(!right.contains(&(at + 1))) };
        column.set_padding((0, gap));
        if right.contains(&at) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let mut text = String::new();
    for line in table.lines() {
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

/// `line` with its last word in color.
pub(crate) fn colored(line: &str, mood: Mood) -> String {
    let at = line.rfind(' ').map_or(0, |at| at + 1);
    format!("{}{}", &line[..at], painted(&line[at..], mood))
}

/// `text` in the color of this state.
pub(crate) fn painted(text: &str, mood: Mood) -> String {
    let code = match mood {
        Mood::Good => return text.to_owned(),
        Mood::Odd => 33,
        Mood::Bad => 31,
    };
    format!("\x1b[{code}m{text}\x1b[0m")
}

/// A sentence in lines of at most 80 columns, the first after `first`, the others indented as much.
pub(crate) fn wrapped(first: &str, sentence: &str) -> String {
    let indent = first.chars().count();
    let mut text = first.to_owned();
    let mut column = indent;
    for word in clean(sentence).split_whitespace() {
        let length = word.chars().count();
        if column > indent && column + 1 + length > WIDTH {
            let _ = write!(text, "\n{:indent$}", "");
            column = indent;
        } else if column > indent {
            text.push(' ');
            column += 1;
        }
        text.push_str(word);
        column += length;
    }
    text.push('\n');
    text
}

/// JSON with a line feed at its end. Characters that are no plain text become escapes, which JSON
/// reads as the same.
///
/// # Errors
/// Never for the types of this program.
pub(crate) fn json(value: &impl Serialize) -> Result<String, Failure> {
    let text = serde_json::to_string_pretty(value).map_err(Failure::other)?;
    let mut plain = String::with_capacity(text.len() + 1);
    for c in text.chars() {
        if (c.is_control() && c != '\n') || is_hidden(c) {
            let mut units = [0; 2];
            for unit in c.encode_utf16(&mut units) {
                let _ = write!(plain, "\\u{unit:04x}");
            }
        } else {
            plain.push(c);
        }
    }
    plain.push('\n');
    Ok(plain)
}

/// Writes to stdout. Returns whether the reader still reads it.
pub(crate) fn print(text: &str) -> bool {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).is_ok()
}

/// A time span in at most two characters of a unit: `45s`, `12m`, `5h`, `3d`.
pub(crate) fn span(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7_200 => format!("{}m", seconds / 60),
        7_200..172_800 => format!("{}h", seconds / 3_600),
        _ => format!("{}d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminal_control_characters_are_escaped() {
        assert_eq!(clean("team/a-1"), "team/a-1");
        assert_eq!(
            clean("a\x1b[2Jb\r\n\u{9b}31m\u{202e}c"),
            r"a\u{1b}[2Jb\u{d}\u{a}\u{9b}31m\u{202e}c"
        );
        let written = json(&"a\x1b\u{9b}\u{202e}\u{e0001}é").unwrap();
        assert_eq!(written, "\"a\\u001b\\u009b\\u202e\\udb40\\udc01é\"\n");
        let read: String = serde_json::from_str(&written).unwrap();
        assert_eq!(read, "a\x1b\u{9b}\u{202e}\u{e0001}é");
    }

    #[test]
    fn sentences_are_wrapped_and_tables_aligned() {
        let text = wrapped("  1. ", &"word ".repeat(40));
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(text.lines().skip(1).all(|line| line.starts_with("     word")), "{text}");
        let rows = vec![vec!["a".into(), "10".into()], vec!["bcd".into(), "5".into()]];
        assert_eq!(table(&["NAME", "N"], &[1], rows), "NAME  N\na    10\nbcd   5\n");
        assert_eq!(colored("a  bad", Mood::Bad), "a  \x1b[31mbad\x1b[0m");
    }

    #[test]
    fn spans_are_short() {
        for (seconds, text) in
            [(0, "0s"), (119, "119s"), (120, "2m"), (7_200, "2h"), (200_000, "2d")]
        {
            assert_eq!(span(seconds), text);
        }
    }
}
