//! Errors with what lies below them.

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
}
