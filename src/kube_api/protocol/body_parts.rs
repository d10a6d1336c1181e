//! How the bodies of the protocol are read: field names in any case, each once, and raw text for
//! parts that are not read.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::pod::seen_pod::LONGEST_NAME;
use crate::protocol::bounds::{LONGEST_OBJECT, MAX_DEPTH, MOST_NODES, ProtocolError};
use crate::protocol::names::NodeNames;
use crate::request::bounded::{Bounded, outside_texts};

/// Most fields of a body that are not in the protocol.
const MOST_UNKNOWN: usize = 64;

/// Refuses deep nesting where the JSON parser itself does not count: in raw and in ignored values.
/// The text may be anything; for JSON the result is right.
pub fn check_depth(json: &str) -> Result<(), ProtocolError> {
    // Most bodies have fewer brackets than this, and counting them takes a tenth of the time.
    let brackets = json
        .as_bytes()
        .chunks(128)
        .map(|bytes| u32::from(bytes.iter().map(|byte| u8::from(byte | 0x20 == b'{')).sum::<u8>()));
    if brackets.sum::<u32>() <= MAX_DEPTH {
        return Ok(());
    }
    let mut depth = 0_u32;
    for byte in outside_texts(json.as_bytes()) {
        match byte {
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MAX_DEPTH {
            return Err(ProtocolError::Depth);
        }
    }
    Ok(())
}

/// A node name, borrowed if it has no escapes.
#[derive(Deserialize)]
pub(crate) struct Name<'a>(#[serde(borrow)] pub(crate) Cow<'a, str>);

/// A list with no more items than a cluster has nodes.
pub(crate) type OfNodes<T> = Bounded<T, MOST_NODES>;

/// The entries of a JSON object of texts with a wanted key. All others are checked and left out.
pub(crate) fn texts(
    json: &RawValue,
    is_wanted: impl Fn(&str) -> bool,
) -> Result<BTreeMap<String, String>, serde_json::Error> {
    Wanted(is_wanted).deserialize(&mut serde_json::Deserializer::from_str(json.get()))
}

struct Wanted<F>(F);

impl<'de, F: Fn(&str) -> bool> DeserializeSeed<'de> for Wanted<F> {
    type Value = BTreeMap<String, String>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de, F: Fn(&str) -> bool> Visitor<'de> for Wanted<F> {
    type Value = BTreeMap<String, String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of texts")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut entries = BTreeMap::new();
        while let Some((Name(key), Name(value))) = map.next_entry::<Name<'_>, Name<'_>>()? {
            if self.0(&key) {
                entries.insert(key.into_owned(), value.into_owned());
            }
        }
        Ok(entries)
    }
}

/// The raw values of the fields of a body; `null` is like none. Go ignores case in names, and serde's
/// derive does not. A value is scanned twice, which takes 1.6 times the instructions for a list of
/// names; kube-scheduler's lists take a quicker way.
///
/// # Errors
/// [`ProtocolError`], also for a field that is given twice, and for one that is not in `names` and
/// nested too deeply.
pub fn fields<'a, const N: usize>(
    body: &'a str,
    names: [&'static str; N],
) -> Result<[Option<&'a RawValue>; N], ProtocolError> {
    let mut json = serde_json::Deserializer::from_str(body);
    let fields = FieldsVisitor(names).deserialize(&mut json);
    let fields = fields.and_then(|fields| json.end().map(|()| fields));
    let (known, unknown) = fields.map_err(|error| ProtocolError::json(&error))?;
    unknown.into_iter().try_for_each(|raw| check_depth(raw.get()))?;
    Ok(known.map(|raw| raw.filter(|raw| raw.get() != "null")))
}

/// Reads a part of a body.
///
/// # Errors
/// [`ProtocolError::Json`].
pub fn part<'a, T: Deserialize<'a>>(raw: &'a RawValue) -> Result<T, ProtocolError> {
    serde_json::from_str(raw.get()).map_err(|error| ProtocolError::json(&error))
}

struct FieldsVisitor<const N: usize>([&'static str; N]);

impl<'de, const N: usize> DeserializeSeed<'de> for FieldsVisitor<N> {
    type Value = ([Option<&'de RawValue>; N], Vec<&'de RawValue>);

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de, const N: usize> Visitor<'de> for FieldsVisitor<N> {
    type Value = ([Option<&'de RawValue>; N], Vec<&'de RawValue>);

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object with `{}`", self.0.join("`, `"))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut known, mut unknown) = ([None; N], Vec::new());
        while let Some((Name(key), value)) = map.next_entry()? {
            match self.0.iter().position(|name| name.eq_ignore_ascii_case(&key)) {
                Some(at) if known[at].is_some() => {
                    return Err(A::Error::duplicate_field(self.0[at]));
                }
                Some(at) => known[at] = Some(value),
                None if unknown.len() == MOST_UNKNOWN => {
                    let error = format!("more than {MOST_UNKNOWN} unknown fields");
                    return Err(A::Error::custom(error));
                }
                None => unknown.push(value),
            }
        }
        Ok((known, unknown))
    }
}

/// The pod and the names of a body in the form in which Go writes it, with names without escapes;
/// else `None`. Names are most of the body, and this reads them in a fifth of the time. The pod's
/// text is not checked: if it is one JSON object, so is the whole body, with these fields.
pub(crate) fn quick_parts(body: &str) -> Option<(&str, NodeNames<'_>)> {
    const NAMES: &str = ",\"Nodes\":null,\"NodeNames\":[";
    let rest = body.strip_prefix("{\"Pod\":")?;
    let at = memchr::memmem::find(rest.as_bytes(), NAMES.as_bytes())?;
    Some((&rest[..at], NodeNames::plain(&rest[at + NAMES.len()..])?))
}

/// A NodeList, its items raw.
#[derive(Deserialize)]
struct NodeListIn<'a> {
    #[serde(borrow, default, bound(deserialize = "'de: 'a"))]
    items: Option<OfNodes<&'a RawValue>>,
}

/// The fields of a Node that are read.
#[derive(Deserialize)]
struct NodeIn<'a> {
    #[serde(borrow)]
    metadata: NodeMetadata<'a>,
    #[serde(borrow, default)]
    status: Option<NodeStatus<'a>>,
}

#[derive(Deserialize)]
struct NodeMetadata<'a> {
    name: String,
    #[serde(borrow, default)]
    labels: Option<&'a RawValue>,
}

#[derive(Default, Deserialize)]
struct NodeStatus<'a> {
    #[serde(borrow, default)]
    allocatable: Option<&'a RawValue>,
}

/// The items of a NodeList, each with the fields that are read.
///
/// # Errors
/// [`ProtocolError::Json`] if it is no such list or a node has no name.
pub(crate) fn node_objects(list: &RawValue) -> Result<Vec<NodeObject<'_>>, ProtocolError> {
    let list: NodeListIn<'_> = part(list)?;
    list.items.unwrap_or_default().0.into_iter().map(node_object).collect()
}

fn node_object(raw: &RawValue) -> Result<NodeObject<'_>, ProtocolError> {
    ProtocolError::if_longer("Nodes", raw.get().len(), LONGEST_OBJECT)?;
    let node: NodeIn<'_> = part(raw)?;
    ProtocolError::if_longer("Nodes", node.metadata.name.len(), LONGEST_NAME)?;
    let allocatable = node.status.unwrap_or_default().allocatable;
    for map in [node.metadata.labels, allocatable].into_iter().flatten() {
        texts(map, |_| false).map_err(|error| ProtocolError::json(&error))?;
    }
    Ok(NodeObject {
        raw,
        name: node.metadata.name,
        labels: TextMap(node.metadata.labels),
        allocatable: TextMap(allocatable),
    })
}

/// One Node object of a call, with its text to send back unchanged.
#[derive(Debug)]
pub struct NodeObject<'a> {
    /// The text of the object.
    pub raw: &'a RawValue,
    pub name: String,
    /// Its labels; few of them are ever read.
    pub labels: TextMap<'a>,
    /// `status.allocatable`, as written.
    pub allocatable: TextMap<'a>,
}

/// A JSON object of texts that stays in the body.
#[derive(Clone, Copy, Debug, Default)]
pub struct TextMap<'a>(pub(crate) Option<&'a RawValue>);

impl TextMap<'_> {
    /// The entries with a wanted key.
    pub fn entries(&self, is_wanted: impl Fn(&str) -> bool) -> BTreeMap<String, String> {
        self.0.and_then(|json| texts(json, is_wanted).ok()).unwrap_or_default()
    }
}
