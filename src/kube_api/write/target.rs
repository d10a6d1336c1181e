//! What a Binding is written for, checked before it leaves the process.
//!
//! The API server checks nothing in a Binding's metadata. An annotation that it would not accept
//! elsewhere makes the pod unwritable forever. So all parts are checked here, and these types have
//! no other constructors.

use std::collections::BTreeMap;
use std::fmt;

use k8s_openapi::api::core::v1::Pod;

use crate::containers::mps::ClientLimits;
use crate::pod::seen_parts::MAX_ANNOTATION_BYTES;
use crate::pod::seen_pod::SeenPod;
use crate::request::placement::{PlacementError, encode};
use crate::request::request_error::{RequestError, shown};
use engine::model::reservation::{Placement, PodRef};
use wire::ids::{NodeName, PodUid};

/// Why nothing can be written for a pod.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    /// A name that is invalid in Kubernetes and could change the path of a URL.
    #[error(
        "{kind} `{name}` is not a valid Kubernetes name: lower-case letters, digits, `-` and `.`"
    )]
    Name { kind: &'static str, name: String },
    /// An unknown precondition, without which a late Binding could not be detected.
    #[error("the pod has no `{field}`, which a Binding needs")]
    Missing { field: &'static str },
    /// A placement that gpupack would not trust when it reads it back.
    #[error(transparent)]
    Placement(#[from] PlacementError),
    /// The pod's annotations leave no room, even without the placement.
    #[error(transparent)]
    Full(RequestError),
    /// The pod's annotations would be too long with the placement.
    #[error(
        "the pod would carry `{bytes}` bytes of annotations, at most {MAX_ANNOTATION_BYTES} may be \
         written: remove some of its own"
    )]
    AnnotationBytes { bytes: usize },
}

/// Namespace and name of a pod, safe in a URL.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodKey {
    namespace: String,
    name: String,
}

impl PodKey {
    /// Checks both names.
    ///
    /// # Errors
    /// [`TargetError::Name`].
    pub fn new(namespace: &str, name: &str) -> Result<Self, TargetError> {
        let namespace = checked_name("namespace", namespace)?;
        Ok(Self { namespace, name: checked_name("pod", name)? })
    }

    /// The key of a pod that gpupack knows.
    ///
    /// # Errors
    /// [`TargetError::Name`].
    pub fn of(pod: &PodRef) -> Result<Self, TargetError> {
        let (namespace, name) = pod.parts();
        Self::new(namespace, name)
    }

    /// The namespace.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl fmt::Display for PodKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// One pod in the version that was decided on, its node, and the annotations to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BindTarget {
    pub(crate) key: PodKey,
    pub(crate) uid: PodUid,
    pub(crate) resource_version: String,
    pub(crate) node: NodeName,
    pub(crate) annotations: BTreeMap<String, String>,
}

impl BindTarget {
    /// The annotations that it writes.
    pub fn annotations(&self) -> &BTreeMap<String, String> {
        &self.annotations
    }

    /// The Binding of `pod` to the node and devices of `placement`, with the `limits` of its
    /// containers.
    ///
    /// # Errors
    /// [`TargetError`] if any part cannot be written safely.
    pub fn new(
        pod: &SeenPod,
        placement: &Placement,
        limits: &ClientLimits,
    ) -> Result<Self, TargetError> {
        if let Some(full) = pod.annotations.full() {
            return Err(TargetError::Full(full));
        }
        let mut annotations = encode(placement)?;
        annotations.extend(limits.annotations());
        let ours: usize = annotations.iter().map(|(key, value)| key.len() + value.len()).sum();
        let bytes = pod.annotations.bytes.saturating_add(ours);
        if bytes > MAX_ANNOTATION_BYTES {
            return Err(TargetError::AnnotationBytes { bytes });
        }
        Ok(Self { annotations, ..Self::without_gpu(pod, &placement.node)? })
    }

    /// The Binding of a pod that requests no GPU: only the node.
    ///
    /// # Errors
    /// [`TargetError::Name`], [`TargetError::Missing`].
    pub fn without_gpu(pod: &SeenPod, node: &NodeName) -> Result<Self, TargetError> {
        let needed = [
            ("metadata.uid", pod.pod.uid.as_str()),
            ("metadata.resourceVersion", &pod.resource_version),
        ];
        if let Some((field, _)) = needed.into_iter().find(|(_, value)| value.is_empty()) {
            return Err(TargetError::Missing { field });
        }
        checked_name("node", node.as_str())?;
        Ok(Self {
            key: PodKey::new(&pod.namespace, &pod.name)?,
            uid: pod.pod.uid.clone(),
            resource_version: pod.resource_version.clone(),
            node: node.clone(),
            annotations: BTreeMap::new(),
        })
    }

    /// Namespace and name of the pod.
    pub fn key(&self) -> &PodKey {
        &self.key
    }

    /// UID of the pod.
    pub fn uid(&self) -> &PodUid {
        &self.uid
    }

    /// The node.
    pub fn node(&self) -> &NodeName {
        &self.node
    }

    /// What `pod` shows about this Binding.
    pub(crate) fn trace_in(&self, pod: &Pod) -> Trace {
        let metadata = &pod.metadata;
        if metadata.uid.as_deref() != Some(self.uid.as_str()) {
            return Trace::OtherPod;
        }
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
        match node.filter(|node| !node.is_empty()) {
            None if metadata.resource_version.as_ref() == Some(&self.resource_version) => {
                Trace::Unchanged
            }
            None => Trace::Fenced,
            Some(node) if node == self.node.as_str() && self.is_written_in(pod) => Trace::Ours,
            Some(_) => Trace::OtherBinding,
        }
    }

    fn is_written_in(&self, pod: &Pod) -> bool {
        let written = pod.metadata.annotations.as_ref();
        self.annotations
            .iter()
            .all(|(key, value)| written.and_then(|written| written.get(key)) == Some(value))
    }
}

/// What a pod that was just read shows about a Binding that may still arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trace {
    Ours,
    /// The pod is bound, but not by this Binding, which can no longer succeed.
    OtherBinding,
    /// Not bound, in the version that the Binding requires: it may still succeed.
    Unchanged,
    /// Not bound, in another version: it can no longer succeed.
    Fenced,
    /// Another pod of the same name: it can no longer succeed.
    OtherPod,
}

/// A DNS subdomain: the form of names of namespaces, pods and nodes. Only these go into a URL.
fn checked_name(kind: &'static str, name: &str) -> Result<String, TargetError> {
    match name.len() <= 253 && name.split('.').all(is_dns_label) {
        true => Ok(name.to_owned()),
        false => Err(TargetError::Name { kind, name: shown(name) }),
    }
}

fn is_dns_label(text: &str) -> bool {
    let is_framed = !text.is_empty() && !text.starts_with('-') && !text.ends_with('-');
    is_framed && text.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::hardware::pool::ConfiguredIsolation;
    use engine::model::reservation::PlacedDevice;
    use wire::ids::DeviceId;
    use wire::units::{Demand, MemMib, Share};

    fn placement() -> Placement {
        let demand = Demand { memory: MemMib::new(4), share: Share::from_millionths(5) };
        let id = DeviceId::new("GPU-a").unwrap();
        let devices = vec![PlacedDevice { id, demand }];
        Placement {
            node: NodeName::new("n1"),
            devices,
            isolation: ConfiguredIsolation::None,
            guest: None,
            spots: Vec::new(),
        }
    }

    fn pod(version: &str, note: usize) -> SeenPod {
        let note = "x".repeat(note);
        SeenPod::from_json(&format!(
            r#"{{"metadata":{{"uid":"u","namespace":"a","name":"p","resourceVersion":"{version}","annotations":{{"note":"{note}"}}}}}}"#
        ))
        .unwrap()
    }

    #[test]
    fn only_names_of_kubernetes_go_into_a_url() {
        assert_eq!(PodKey::new("team-a", "infer-7.x").unwrap().to_string(), "team-a/infer-7.x");
        let long = "a".repeat(254);
        for name in ["", "..", ".", "a/b", "a b", "A", "a?x=1", "a%2e", "-a", "a.", "é", &long] {
            assert!(PodKey::new("team-a", name).is_err(), "{name}");
            assert!(PodKey::new(name, "p").is_err(), "{name}");
        }
    }

    #[test]
    fn a_target_needs_its_preconditions_and_room() {
        let target =
            BindTarget::new(&pod("8", 10), &placement(), &ClientLimits::default()).unwrap();
        assert_eq!((target.key().to_string().as_str(), target.annotations.len()), ("a/p", 4));
        let missing =
            BindTarget::new(&pod("", 10), &placement(), &ClientLimits::default()).unwrap_err();
        assert_eq!(missing, TargetError::Missing { field: "metadata.resourceVersion" });
        let full = |pod| BindTarget::new(&pod, &placement(), &ClientLimits::default()).unwrap_err();
        assert!(matches!(full(pod("8", 261_100)), TargetError::AnnotationBytes { .. }));
        assert!(matches!(full(pod("8", 262_000)), TargetError::Full(_)));
        let mut many = pod("8", 10);
        many.annotations.count = 1_001;
        assert!(full(many).to_string().contains("`1001` annotations"));
        let nowhere = Placement { node: NodeName::new("n/1"), ..placement() };
        assert!(BindTarget::new(&pod("8", 0), &nowhere, &ClientLimits::default()).is_err());
    }
}
