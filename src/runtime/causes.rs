//! Texts of errors: with what lies below them, and cut if they may quote a body.

use std::error::Error;

/// An error with everything below it, in one line: hyper hides the interesting part there. What the line
/// has already is not repeated.
pub fn with_causes(error: &dyn Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let text = inner.to_string();
        if !line.contains(&text) {
            line = format!("{line}: {text}");
        }
        cause = inner.source();
    }
    line
}

/// An error of a JSON parser, escaped. It may quote the body, so only its beginning and its end,
/// the position, are kept of a long one.
pub fn shown_long(error: &dyn std::fmt::Display) -> String {
    let text = error.to_string();
    let begins = text.char_indices().nth(150).map(|(at, _)| at);
    let ends = text.char_indices().nth_back(99).map(|(at, _)| at);
    match (begins, ends) {
        (Some(begins), Some(ends)) if begins < ends => {
            format!("{}…{}", escaped(&text[..begins]), escaped(&text[ends..]))
        }
        _ => escaped(&text),
    }
}

fn escaped(part: &str) -> String {
    part.chars().flat_map(char::escape_debug).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    enum Outer {
        #[error("no connection")]
        Brief(#[source] std::io::Error),
        #[error("no connection: {0}")]
        Whole(#[source] std::io::Error),
    }

    #[test]
    fn every_cause_is_reported_once() {
        let refused = || std::io::Error::other("refused");
        assert_eq!(with_causes(&Outer::Brief(refused())), "no connection: refused");
        assert_eq!(with_causes(&Outer::Whole(refused())), "no connection: refused");
    }

    #[test]
    fn a_long_error_keeps_its_beginning_and_its_position() {
        let whole = format!("{} at line 1 column 9", "é".repeat(230));
        assert_eq!(shown_long(&whole), whole, "as short as what is cut");
        let cut = shown_long(&format!("found \"{}\n\" at line 1 column 9", "é".repeat(1 << 20)));
        assert!(cut.starts_with("found \\\"éé") && cut.contains("é…é"), "{cut}");
        assert!(cut.ends_with("é\\n\\\" at line 1 column 9"), "{cut}");
        assert!(cut.chars().count() < 260, "{cut}");
    }
}
