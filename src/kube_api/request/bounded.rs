//! Limits for JSON that any client may send, applied before it takes memory: three bytes of text
//! can become two kilobytes of a pod's container. serde's derive has no limits, so this is by hand.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};

/// A list of at most `MOST` items. Reading fails at the first item beyond it.
#[derive(Debug)]
pub struct Bounded<T, const MOST: usize>(
    /// The items.
    pub Vec<T>,
);

impl<T, const MOST: usize> Default for Bounded<T, MOST> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<'de, T: Deserialize<'de>, const MOST: usize> Deserialize<'de> for Bounded<T, MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(ItemsVisitor(PhantomData))
    }
}

struct ItemsVisitor<T, const MOST: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const MOST: usize> Visitor<'de> for ItemsVisitor<T, MOST> {
    type Value = Bounded<T, MOST>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a sequence")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = list.next_element()? {
            if items.len() == MOST {
                return Err(A::Error::custom(format!("a list of more than {MOST} items")));
            }
            items.push(item);
        }
        Ok(Bounded(items))
    }
}

/// An object of at most `MOST` keys. Reading fails at the first key beyond it.
#[derive(Debug)]
pub struct BoundedMap<T, const MOST: usize>(
    /// The values by key.
    pub BTreeMap<String, T>,
);

impl<'de, T: Deserialize<'de>, const MOST: usize> Deserialize<'de> for BoundedMap<T, MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(KeysVisitor(PhantomData))
    }
}

struct KeysVisitor<T, const MOST: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const MOST: usize> Visitor<'de> for KeysVisitor<T, MOST> {
    type Value = BoundedMap<T, MOST>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut values = BTreeMap::new();
        while let Some((key, value)) = map.next_entry()? {
            values.insert(key, value);
            if values.len() > MOST {
                return Err(A::Error::custom(format!("an object with more than {MOST} keys")));
            }
        }
        Ok(BoundedMap(values))
    }
}

/// The bytes of a JSON document outside its texts, without quotes. It accepts any bytes; the result
/// is right for JSON.
pub fn outside_texts(json: &[u8]) -> impl Iterator<Item = u8> {
    let (mut in_text, mut escaped) = (false, false);
    json.iter().copied().filter(move |byte| {
        let was_in_text = in_text;
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_text => escaped = true,
            b'"' => in_text = !in_text,
            _ => {}
        }
        !was_in_text && !in_text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_rejected_as_soon_as_it_is_too_long() {
        let read = |json: &str| serde_json::from_str::<Bounded<u8, 3>>(json).map(|list| list.0);
        assert_eq!(read("[]").unwrap(), [] as [u8; 0]);
        assert_eq!(read("[1,2,3]").unwrap(), [1, 2, 3]);
        let error = read("[1,2,3,4,").unwrap_err().to_string();
        assert!(error.starts_with("a list of more than 3 items"), "{error}");
    }

    #[test]
    fn an_object_is_rejected_as_soon_as_it_has_too_many_keys() {
        let read = |json: &str| serde_json::from_str::<BoundedMap<u8, 2>>(json).map(|map| map.0);
        let two = BTreeMap::from([("a".to_owned(), 1), ("b".to_owned(), 3)]);
        assert_eq!(read(r#"{"a":1,"b":2,"b":3}"#).unwrap(), two, "the last one counts");
        let error = read(r#"{"a":1,"b":2,"c":3,"#).unwrap_err().to_string();
        assert!(error.starts_with("an object with more than 2 keys"), "{error}");
    }

    #[test]
    fn texts_are_left_out() {
        let outside = |json: &str| String::from_utf8(outside_texts(json.as_bytes()).collect());
        assert_eq!(outside(r#"{"a[\"{,":["b\\",{}],"":1}"#).unwrap(), "{:[,{}],:1}");
    }
}
