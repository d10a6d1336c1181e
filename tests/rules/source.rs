//! What the rule tests (`layering`, `tidy`) share: the files of the repository, and Rust text as words.

use std::fs;
use std::path::Path;

/// A file of the repository.
pub(crate) struct SourceFile {
    /// Path from the repository's root, with `/`.
    pub(crate) path: String,
    /// Its text; empty if it is not text.
    pub(crate) text: String,
}

/// Folders that are no part of the sources.
const SKIPPED: [&str; 3] = ["target", ".git", "node_modules"];

/// All files of the repository, by path.
pub(crate) fn files() -> Vec<SourceFile> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = Vec::new();
    collect(root, root, &mut found);
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}

fn collect(root: &Path, folder: &Path, found: &mut Vec<SourceFile>) {
    let entries = fs::read_dir(folder).expect("the folders of the repository can be read");
    for entry in entries {
        let path = entry.expect("the entries of a folder can be read").path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_symlink() || SKIPPED.contains(&name.as_str()) {
            continue;
        }
        if path.is_dir() {
            collect(root, &path, found);
        } else {
            let text = fs::read_to_string(&path).unwrap_or_default();
            let path = path.strip_prefix(root).expect("it lies below the root");
            found.push(SourceFile { path: path.to_string_lossy().replace('\\', "/"), text });
        }
    }
}

/// A word of Rust text: an identifier, a number, or one sign; `::` and `#[` and `#![` count as one.
/// Comments, texts and characters are left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Word {
    /// The word.
    pub(crate) text: String,
    /// Its line, from 1.
    pub(crate) line: usize,
}

/// The words of a Rust file.
pub(crate) fn words(text: &str) -> Vec<Word> {
    let bytes = text.as_bytes();
    let mut words = Vec::new();
    let (mut at, mut line) = (0, 1);
    while let Some(&byte) = bytes.get(at) {
        let start = at;
        match byte {
            b'/' if bytes[at..].starts_with(b"//") => at = end_of_line(bytes, at),
            b'/' if bytes[at..].starts_with(b"/*") => at = end_of_block_comment(bytes, at),
            b'"' => at = end_of_text(bytes, at + 1),
            b'r' | b'b' | b'c' if let Some(end) = end_of_prefixed_text(bytes, at) => at = end,
            b'\'' => at = end_of_character(bytes, at),
            _ if is_part(byte) => {
                while bytes.get(at).copied().is_some_and(is_part) {
                    at += 1;
                }
                words.push(Word { text: text[start..at].to_owned(), line });
            }
            _ if byte.is_ascii_whitespace() => at += 1,
            _ => {
                let signs = ["::", "#![", "#["];
                let sign = signs.into_iter().find(|sign| text[at..].starts_with(sign));
                at += sign
                    .map_or_else(|| text[at..].chars().next().map_or(1, char::len_utf8), str::len);
                words.push(Word { text: text[start..at].to_owned(), line });
            }
        }
        line += bytes[start..at].iter().filter(|byte| **byte == b'\n').count();
    }
    words
}

fn is_part(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

fn end_of_line(bytes: &[u8], at: usize) -> usize {
    bytes[at..].iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |more| at + more)
}

/// Block comments nest.
fn end_of_block_comment(bytes: &[u8], mut at: usize) -> usize {
    let mut depth = 0_u32;
    while at < bytes.len() {
        if bytes[at..].starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if bytes[at..].starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    at
}

fn end_of_text(bytes: &[u8], mut at: usize) -> usize {
    while let Some(byte) = bytes.get(at) {
        match byte {
            b'"' => return at + 1,
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// `b"…"`, `r"…"`, `br#"…"#` and `c"…"`, where one begins here.
fn end_of_prefixed_text(bytes: &[u8], at: usize) -> Option<usize> {
    if at > 0 && is_part(bytes[at - 1]) {
        return None;
    }
    let letters = bytes[at..].iter().take_while(|byte| byte.is_ascii_alphabetic()).count();
    let is_raw = match &bytes[at..at + letters] {
        b"b" | b"c" => false,
        b"r" | b"br" | b"cr" => true,
        _ => return None,
    };
    let hashes = bytes[at + letters..].iter().take_while(|byte| **byte == b'#').count();
    let quote = at + letters + hashes;
    if bytes.get(quote) != Some(&b'"') || (!is_raw && hashes > 0) {
        return None;
    }
    if !is_raw {
        return Some(end_of_text(bytes, quote + 1));
    }
    let end: Vec<u8> = [&b"\""[..], &b"#".repeat(hashes)].concat();
    let rest = &bytes[quote + 1..];
    let length = rest.windows(end.len()).position(|window| window == end);
    Some(length.map_or(bytes.len(), |length| quote + 1 + length + end.len()))
}

/// A character ends at its quote; a lifetime has none and is only its tick.
fn end_of_character(bytes: &[u8], at: usize) -> usize {
    if bytes.get(at + 1) == Some(&b'\\') {
        let rest = bytes.get(at + 3..).unwrap_or_default();
        return rest.iter().position(|byte| *byte == b'\'').map_or(bytes.len(), |n| at + 4 + n);
    }
    let next = bytes.get(at + 1).copied().unwrap_or(b' ');
    let width = match next {
        0..=0x7f => 1,
        0xc0..=0xdf => 2,
        0xe0..=0xef => 3,
        _ => 4,
    };
    if bytes.get(at + 1 + width) == Some(&b'\'') { at + 2 + width } else { at + 1 }
}
