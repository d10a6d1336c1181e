//! Errors with what lies below them.

use std::error::Error;

/// An error with everything below it, in one line: hyper hides the interesting part there.
pub(crate) fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text = format!("{text}: {inner}");
        cause = inner.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("no connection")]
    struct Outer(#[source] std::io::Error);

    #[test]
    fn every_cause_is_told() {
        let refused = std::io::Error::other("refused");
        assert_eq!(with_causes(&Outer(refused)), "no connection: refused");
    }
}
