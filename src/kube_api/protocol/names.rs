//! The names of thousands of nodes, kept in the body.

use std::borrow::Cow;

use hashbrown::HashSet;

use crate::pod::seen_pod::LONGEST_NAME;
use crate::protocol::bounds::MOST_NODES;

/// Node names in the order of a body. They stay there; only their positions are noted.
#[derive(Debug, Default)]
pub struct NodeNames<'a> {
    /// The body's list, if it has no escapes; otherwise the names alone.
    text: Cow<'a, str>,
    /// Start and end of each.
    places: Vec<(u32, u32)>,
}

impl<'a> NodeNames<'a> {
    /// Reads what follows the bracket that opens the names. `None` unless it is nothing but names
    /// without escapes or blanks between them, and the end of the body.
    pub(crate) fn plain(list: &'a str) -> Option<Self> {
        let list = list.trim_ascii_end().strip_suffix("]}")?;
        let bytes = list.as_bytes();
        // No early end, so that many bytes are checked in one step.
        if bytes.iter().fold(false, |is_odd, byte| is_odd | (*byte < b' ') | (*byte == b'\\')) {
            return None;
        }
        let mut places = Vec::with_capacity((bytes.len() / 12 + 1).min(MOST_NODES));
        let mut rest = bytes.strip_prefix(b"\"")?;
        loop {
            let start = bytes.len() - rest.len();
            let length = quote(rest)?;
            if length > LONGEST_NAME || places.len() == MOST_NODES {
                return None;
            }
            places.push((place(start), place(start + length)));
            match rest[length..].strip_prefix(b"\",\"") {
                Some(more) => rest = more,
                None => {
                    let is_end = rest.len() == length + 1;
                    return is_end.then_some(Self { text: Cow::Borrowed(list), places });
                }
            }
        }
    }

    /// The same for names that cannot stay in the body.
    pub(crate) fn copied(names: &[Cow<'_, str>]) -> Self {
        let ends = names.iter().scan(0, |end, name| {
            *end += name.len();
            Some((place(*end - name.len()), place(*end)))
        });
        Self { places: ends.collect(), text: Cow::Owned(names.concat()) }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Whether certainly none needs an escape in JSON.
    pub fn are_plain(&self) -> bool {
        matches!(self.text, Cow::Borrowed(_))
    }

    /// The names, in their order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> + Clone {
        self.places.iter().map(|(start, end)| self.at(*start, *end))
    }

    /// The names, each once, where it comes first.
    pub fn distinct(&self) -> Vec<&str> {
        let mut known = HashSet::with_capacity(self.len());
        self.iter().filter(|name| known.insert(*name)).collect()
    }

    /// The names in their order, as bytes.
    pub fn bytes(&self) -> impl Iterator<Item = &[u8]> {
        let text = self.text.as_bytes();
        self.places.iter().map(|(start, end)| &text[*start as usize..*end as usize])
    }

    #[inline]
    fn at(&self, start: u32, end: u32) -> &str {
        &self.text[start as usize..end as usize]
    }
}

/// A position in a body: `config` allows bodies of 1 GiB.
fn place(at: usize) -> u32 {
    u32::try_from(at).expect("a body has less than 4 GiB")
}

/// The position of the first quote. Names are short: checking eight bytes in a step takes less than
/// a call of `memchr`.
#[inline]
fn quote(bytes: &[u8]) -> Option<usize> {
    const ONES: u64 = u64::from_le_bytes([1; 8]);
    let (words, rest) = bytes.as_chunks();
    for (at, word) in words.iter().enumerate() {
        let others = u64::from_le_bytes(*word) ^ u64::from_le_bytes([b'"'; 8]);
        // The highest bit of the first byte that is zero; bytes behind it may be marked by mistake.
        let zeros = others.wrapping_sub(ONES) & !others & (ONES << 7);
        if zeros != 0 {
            return Some(8 * at + (zeros.trailing_zeros() / 8) as usize);
        }
    }
    let at = rest.iter().position(|byte| *byte == b'"')?;
    Some(bytes.len() - rest.len() + at)
}
