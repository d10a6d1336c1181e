//! How the bodies of the protocol are read: field names in any case, each once, and raw text for
//! parts that are not read.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::kube_api::pod::seen_pod::LONGEST_NAME;
use crate::kube_api::request::bounded::{Bounded, outside_texts};
use crate::protocol::bounds::{LONGEST_OBJECT, MAX_DEPTH, MOST_NODES, ProtocolError};
use crate::protocol::names::Names;

/// Most fields of a body that are not in the protocol.
const MOST_UNKNOWN: usize = 64;

/// Refuses deep nesting where the JSON parser itself does not count: in raw and in ignored values.
/// The text may be anything; for JSON the result is right.
pub(crate) fn check_depth(json: &str) -> Result<(), ProtocolError> {
    // Most bodies have fewer brackets than this, and counting them takes a tenth of the time.
    let opening = |bytes: &[u8]| bytes.iter().map(|byte| u8::from(byte | 0x20 == b'{')).sum::<u8>();
    let brackets = json.as_bytes().chunks(128).map(|bytes| u32::from(opening(bytes)));
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

/// The outer fields of [`ExtenderArgs`].
#[derive(Default)]
pub(crate) struct Fields<'a> {
    pub(crate) pod: Option<&'a RawValue>,
    pub(crate) nodes: Option<&'a RawValue>,
    pub(crate) node_names: Option<Vec<Name<'a>>>,
    pub(crate) unknown: Vec<&'a RawValue>,
}

impl<'a> Fields<'a> {
    /// Reads a body.
    ///
    /// # Errors
    /// [`ProtocolError`], also for values that are nested too deeply.
    pub(crate) fn parse(json: &'a str) -> Result<Self, ProtocolError> {
        let fields: Self =
            serde_json::from_str(json).map_err(|error| ProtocolError::json(&error))?;
        for raw in fields.unknown.iter().chain([&fields.pod, &fields.nodes].into_iter().flatten()) {
            check_depth(raw.get())?;
        }
        Ok(fields)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Fields<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FieldsVisitor)
    }
}

struct FieldsVisitor;

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = Fields<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with `Pod` and `NodeNames` or `Nodes`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut fields = Fields::default();
        let mut seen = Seen::default();
        while let Some(Name(key)) = map.next_key()? {
            match seen.field(&key, ["Pod", "Nodes", "NodeNames"])? {
                Some("Pod") => fields.pod = not_null(map.next_value()?),
                Some("Nodes") => fields.nodes = not_null(map.next_value()?),
                Some("NodeNames") => {
                    fields.node_names = map.next_value::<Option<OfNodes<_>>>()?.map(|it| it.0);
                }
                _ => note_unknown(&mut fields.unknown, map.next_value()?)?,
            }
        }
        Ok(fields)
    }
}

fn note_unknown<'a, E: serde::de::Error>(
    unknown: &mut Vec<&'a RawValue>,
    value: &'a RawValue,
) -> Result<(), E> {
    if unknown.len() == MOST_UNKNOWN {
        return Err(E::custom(format!("more than {MOST_UNKNOWN} unknown fields")));
    }
    unknown.push(value);
    Ok(())
}

/// The pod and the names of a body in the form in which Go writes it, with names without escapes;
/// else `None`. Names are most of the body, and this reads them in a fifth of the time. The pod's
/// text is not checked: if it is one JSON object, so is the whole body, with these fields.
pub(crate) fn quick_parts(body: &str) -> Option<(&str, Names<'_>)> {
    const NAMES: &str = ",\"Nodes\":null,\"NodeNames\":[";
    let rest = body.strip_prefix("{\"Pod\":")?;
    let at = memchr::memmem::find(rest.as_bytes(), NAMES.as_bytes())?;
    Some((&rest[..at], Names::plain(&rest[at + NAMES.len()..])?))
}

/// The fields of [`ExtenderBindingArgs`].
#[derive(Default)]
pub(crate) struct BindingFields<'a> {
    pub(crate) pod_name: Option<String>,
    pub(crate) pod_namespace: Option<String>,
    pub(crate) pod_uid: Option<String>,
    pub(crate) node: Option<String>,
    pub(crate) unknown: Vec<&'a RawValue>,
}

impl<'de: 'a, 'a> Deserialize<'de> for BindingFields<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(BindingVisitor)
    }
}

struct BindingVisitor;

impl<'de> Visitor<'de> for BindingVisitor {
    type Value = BindingFields<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with `PodName`, `PodNamespace`, `PodUID` and `Node`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut fields = BindingFields::default();
        let mut seen = Seen::default();
        while let Some(Name(key)) = map.next_key()? {
            match seen.field(&key, ["PodName", "PodNamespace", "PodUID", "Node"])? {
                Some("PodName") => fields.pod_name = map.next_value()?,
                Some("PodNamespace") => fields.pod_namespace = map.next_value()?,
                Some("PodUID") => fields.pod_uid = map.next_value()?,
                Some("Node") => fields.node = map.next_value()?,
                _ => note_unknown(&mut fields.unknown, map.next_value()?)?,
            }
        }
        Ok(fields)
    }
}

/// The fields of `ExtenderPreemptionArgs` in `server::scheduler::preempt`.
#[derive(Default)]
pub(crate) struct PreemptionFields<'a> {
    pub(crate) pod: Option<&'a RawValue>,
    pub(crate) victims: Option<&'a RawValue>,
    pub(crate) meta_victims: Option<&'a RawValue>,
}

impl<'de: 'a, 'a> Deserialize<'de> for PreemptionFields<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(PreemptionVisitor)
    }
}

struct PreemptionVisitor;

impl<'de> Visitor<'de> for PreemptionVisitor {
    type Value = PreemptionFields<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with `Pod` and `NodeNameToMetaVictims` or `NodeNameToVictims`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut fields = PreemptionFields::default();
        let mut seen = Seen::default();
        while let Some(Name(key)) = map.next_key()? {
            match seen.field(&key, ["Pod", "NodeNameToVictims", "NodeNameToMetaVictims"])? {
                Some("Pod") => fields.pod = not_null(map.next_value()?),
                Some("NodeNameToVictims") => fields.victims = not_null(map.next_value()?),
                Some("NodeNameToMetaVictims") => fields.meta_victims = not_null(map.next_value()?),
                _ => drop(map.next_value::<&RawValue>()?),
            }
        }
        Ok(fields)
    }
}

/// The known fields seen so far in one object.
#[derive(Default)]
struct Seen(Vec<&'static str>);

impl Seen {
    /// The one of `known` that equals `key` in any case; `None` for an unknown key.
    fn field<E: serde::de::Error, const N: usize>(
        &mut self,
        key: &str,
        known: [&'static str; N],
    ) -> Result<Option<&'static str>, E> {
        let Some(field) = known.into_iter().find(|field| field.eq_ignore_ascii_case(key)) else {
            return Ok(None);
        };
        if self.0.contains(&field) {
            return Err(E::duplicate_field(field));
        }
        self.0.push(field);
        Ok(Some(field))
    }
}

fn not_null(raw: &RawValue) -> Option<&RawValue> {
    (raw.get() != "null").then_some(raw)
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
    let list: NodeListIn<'_> =
        serde_json::from_str(list.get()).map_err(|error| ProtocolError::json(&error))?;
    list.items.unwrap_or_default().0.into_iter().map(node_object).collect()
}

fn node_object(raw: &RawValue) -> Result<NodeObject<'_>, ProtocolError> {
    ProtocolError::if_longer("Nodes", raw.get().len(), LONGEST_OBJECT)?;
    let node: NodeIn<'_> =
        serde_json::from_str(raw.get()).map_err(|error| ProtocolError::json(&error))?;
    ProtocolError::if_longer("Nodes", node.metadata.name.len(), LONGEST_NAME)?;
    let map = |json: Option<&'_ RawValue>| {
        json.map_or(Ok(()), |json| texts(json, |_| false).map(|_| ()))
            .map_err(|error| ProtocolError::json(&error))
    };
    let allocatable = node.status.unwrap_or_default().allocatable;
    map(node.metadata.labels)?;
    map(allocatable)?;
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
    /// Its name.
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
