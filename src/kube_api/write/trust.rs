//! The objects with certificates: Secrets, a ConfigMap, and objects that name a CA. Each is read, and
//! written in the version that was read. gpupack creates and deletes none of them.

use hyper::Request;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use kube::api::{GetParams, Patch, PatchParams, PostParams};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::write::outcome::Cause;
use crate::write::writer::{ApiWriter, cause_of, object_of};

/// What became of a write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeptWrite {
    Done,
    /// The object has changed since it was read, or is gone. Nothing was written.
    Changed,
    /// It was refused; or it is not known whether it was written.
    Failed(Cause),
}

/// An object that has certificates, or names a CA.
pub trait KeptObject: Serialize + DeserializeOwned {
    /// The path of its kind, in a namespace if it is in one.
    fn path(namespace: &str) -> String;
    /// Name, version and the like.
    fn metadata(&self) -> &ObjectMeta;
}

macro_rules! kept {
    ($kind:ty, $path:expr) => {
        impl KeptObject for $kind {
            fn path(namespace: &str) -> String {
                $path.replace("{}", namespace)
            }
            fn metadata(&self) -> &ObjectMeta {
                &self.metadata
            }
        }
    };
}

kept!(Secret, "/api/v1/namespaces/{}/secrets");
kept!(ConfigMap, "/api/v1/namespaces/{}/configmaps");
kept!(
    MutatingWebhookConfiguration,
    "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
);
kept!(APIService, "/apis/apiregistration.k8s.io/v1/apiservices");

/// How a patch is merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Merge {
    Plain,
    /// Items of lists are found by their names.
    ByName,
}

impl ApiWriter {
    /// Reads an object, `None` if there is none; and when that was by the clock of the API server, in seconds
    /// since 1970, if it says so.
    ///
    /// # Errors
    /// [`Cause`] if it cannot be read.
    pub async fn read_kept<T: KeptObject>(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<(Option<T>, Option<u64>), Cause> {
        let request = kube::core::Request::new(T::path(namespace));
        let answer =
            self.exchange(request.get(name, &GetParams::default()), self.timeout()).await?;
        match answer.status {
            200..=299 => Ok((Some(object_of(&answer)?), answer.date)),
            404 => Ok((None, answer.date)),
            _ => Err(cause_of(&answer)),
        }
    }

    /// Replaces an object, if it is still in the version that it has here.
    pub async fn replace_kept<T: KeptObject>(&self, object: &T) -> KeptWrite {
        let request = request_of(object).and_then(|(request, name)| {
            let body =
                serde_json::to_vec(object).map_err(kube::core::request::Error::SerializeBody)?;
            request.replace(name, &PostParams::default(), body)
        });
        self.write_kept(request).await
    }

    /// Changes fields of an object, if it is still in the version that it has here.
    pub async fn patch_kept<T: KeptObject>(
        &self,
        object: &T,
        fields: Value,
        merge: Merge,
    ) -> KeptWrite {
        let mut fields = fields;
        fields["metadata"]["resourceVersion"] = object.metadata().resource_version.clone().into();
        let patch = match merge {
            Merge::Plain => Patch::Merge(fields),
            Merge::ByName => Patch::Strategic(fields),
        };
        let request = request_of(object)
            .and_then(|(request, name)| request.patch(name, &PatchParams::default(), &patch));
        self.write_kept(request).await
    }

    async fn write_kept(
        &self,
        request: Result<Request<Vec<u8>>, kube::core::request::Error>,
    ) -> KeptWrite {
        match self.write(request).await {
            Ok(answer) => match answer.status {
                200..=299 => KeptWrite::Done,
                404 | 409 => KeptWrite::Changed,
                _ => KeptWrite::Failed(cause_of(&answer)),
            },
            Err(cause) => KeptWrite::Failed(cause),
        }
    }
}

type Addressed<'a> = Result<(kube::core::Request, &'a str), kube::core::request::Error>;

/// Where an object is. One without a version is not written: it would overwrite what others wrote.
fn request_of<T: KeptObject>(object: &T) -> Addressed<'_> {
    let ObjectMeta { name, namespace, resource_version, .. } = object.metadata();
    let is_read = resource_version.as_ref().is_some_and(|version| !version.is_empty());
    match name.as_deref().filter(|_| is_read) {
        Some(name) => {
            let path = T::path(namespace.as_deref().unwrap_or_default());
            Ok((kube::core::Request::new(path), name))
        }
        None => Err(kube::core::request::Error::Validation(
            "the object has no name or no version".to_owned(),
        )),
    }
}
