//! Who calls through the API server: it shows a certificate of its own and names the user in headers.
//! See "Configure the Aggregation Layer" in Kubernetes' docs.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use hyper::HeaderMap;
use hyper::header::{CONNECTION, HeaderName, HeaderValue};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use rustls::pki_types::CertificateDer;
use tokio::sync::watch;
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;

use crate::certificates::ClientCheck;
use crate::kube_api::identity::people::Person;

/// Where each API server writes how it proves itself.
const NAMESPACE: &str = "kube-system";
const NAME: &str = "extension-apiserver-authentication";

/// How often it is read again: its CA is renewed long before it ends.
const READ_EVERY: Duration = Duration::from_secs(60);

/// How soon it is read again after a failure.
const RETRY_EVERY: Duration = Duration::from_secs(5);

/// The headers by which one replica tells another one who calls.
const USER: &str = "x-remote-user";
const UID: &str = "x-remote-uid";
const GROUP: &str = "x-remote-group";
const EXTRA: &str = "x-remote-extra-";

/// What a key is not written with in the name of a header: capital letters too, as names of headers have none.
const ESCAPED: AsciiSet = escaped();

const fn escaped() -> AsciiSet {
    let (mut set, mut letter) = (NON_ALPHANUMERIC.add(b'A'), b'B');
    while letter <= b'Z' {
        set = set.add(letter);
        letter += 1;
    }
    set
}

/// How the API server proves itself and names users.
#[derive(Debug)]
pub struct FrontProxy {
    clients: ClientCheck,
    /// Common names of its certificate; empty for any.
    names: Vec<String>,
    users: Headers,
}

/// The headers that name a user.
#[derive(Debug)]
struct Headers {
    user: Vec<String>,
    uid: Vec<String>,
    group: Vec<String>,
    extra: Vec<String>,
}

impl FrontProxy {
    /// Reads the ConfigMap; `None` if the API server does not call others.
    ///
    /// # Errors
    /// What cannot be read.
    fn read(map: &ConfigMap) -> Result<Option<Self>, String> {
        let data = map.data.as_ref();
        let value = |key: &str| data.and_then(|data| data.get(key)).map(String::as_str);
        let Some(ca) = value("requestheader-client-ca-file") else { return Ok(None) };
        let list = |key: &str| -> Result<Vec<String>, String> {
            let text = value(key).unwrap_or("[]");
            serde_json::from_str(text).map_err(|error| format!("`{key}`: {error}"))
        };
        Ok(Some(Self {
            clients: ClientCheck::of_ca(ca.as_bytes())
                .map_err(|error| format!("`requestheader-client-ca-file`: {error}"))?,
            names: list("requestheader-allowed-names")?,
            users: Headers {
                user: list("requestheader-username-headers")?,
                uid: list("requestheader-uid-headers")?,
                group: list("requestheader-group-headers")?,
                extra: list("requestheader-extra-headers-prefix")?,
            },
        }))
    }

    /// Whether a client with this certificate chain is the API server.
    pub fn is_it(&self, chain: &[CertificateDer<'static>]) -> bool {
        self.clients.accepts(chain) && (self.names.is_empty() || self.has_name(chain))
    }

    fn has_name(&self, chain: &[CertificateDer<'static>]) -> bool {
        let Some(Ok((_, first))) = chain.first().map(|first| X509Certificate::from_der(first))
        else {
            return false;
        };
        let mut common = first.subject().iter_common_name().filter_map(|name| name.as_str().ok());
        common.any(|name| self.names.iter().any(|one| one == name))
    }

    /// The user in these headers.
    pub fn person(&self, headers: &HeaderMap) -> Option<Person> {
        self.users.person(headers)
    }
}

impl Headers {
    fn person(&self, headers: &HeaderMap) -> Option<Person> {
        let all = |names: &[String]| -> Vec<String> {
            let values = names.iter().flat_map(|name| headers.get_all(name.as_str()));
            values.filter_map(text).collect()
        };
        let name = all(&self.user).into_iter().find(|name| !name.is_empty())?;
        let mut extra: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (header, value) in headers {
            let Some(key) = self.extra.iter().find_map(|prefix| {
                header.as_str().strip_prefix(prefix.to_ascii_lowercase().as_str())
            }) else {
                continue;
            };
            let key = percent_decode_str(key).decode_utf8_lossy().into_owned();
            if let Some(value) = text(value) {
                extra.entry(key).or_default().push(value);
            }
        }
        let uid = all(&self.uid).into_iter().next();
        Some(Person { name, uid, groups: all(&self.group), extra })
    }
}

/// A value, which is UTF-8 as the API server writes it.
fn text(value: &HeaderValue) -> Option<String> {
    String::from_utf8(value.as_bytes().to_vec()).ok()
}

/// The headers of replicas.
fn of_replicas() -> Headers {
    let one = |name: &str| vec![name.to_owned()];
    Headers { user: one(USER), uid: one(UID), group: one(GROUP), extra: one(EXTRA) }
}

/// The user that another replica names.
pub fn named_by_replica(headers: &HeaderMap) -> Option<Person> {
    of_replicas().person(headers)
}

/// Names the user in the headers of a call, for another replica; what the client wrote there goes. So does what it
/// wrote about its connection, which could have named these headers as some that are not handed on. Whether all
/// of the user could be written: without a part of him he could have other rights there.
#[must_use]
pub fn name_to_replica(headers: &mut HeaderMap, person: &Person) -> bool {
    let ours = |name: &HeaderName| name.as_str().starts_with("x-remote-");
    let written: Vec<HeaderName> = headers.keys().filter(|name| ours(name)).cloned().collect();
    for name in written {
        headers.remove(name);
    }
    headers.remove(CONNECTION);
    let mut is_whole = true;
    let mut add = |name: &str, value: &str| {
        let name = HeaderName::try_from(name.to_ascii_lowercase());
        match (name, HeaderValue::from_bytes(value.as_bytes())) {
            (Ok(name), Ok(value)) => is_whole &= headers.try_append(name, value).is_ok(),
            _ => is_whole = false,
        }
    };
    add(USER, &person.name);
    person.uid.iter().for_each(|uid| add(UID, uid));
    person.groups.iter().for_each(|group| add(GROUP, group));
    for (key, values) in &person.extra {
        let name = format!("{EXTRA}{}", utf8_percent_encode(key, &ESCAPED));
        values.iter().for_each(|value| add(&name, value));
    }
    is_whole
}

/// Reads again and again how the API server proves itself.
pub async fn follow(client: Client, current: watch::Sender<Option<Arc<FrontProxy>>>) {
    let maps: Api<ConfigMap> = Api::namespaced(client, NAMESPACE);
    let mut had_fault = false;
    loop {
        let found = match maps.get(NAME).await {
            Ok(map) => FrontProxy::read(&map),
            Err(error) => Err(error.to_string()),
        };
        let pause = match found {
            Ok(found) => {
                had_fault = false;
                current.send_replace(found.map(Arc::new));
                READ_EVERY
            }
            Err(error) => {
                if !had_fault {
                    tracing::warn!(
                        %error,
                        "nobody can call through the API server: cannot read ConfigMap \
                         {NAMESPACE}/{NAME}; grant Role extension-apiserver-authentication-reader"
                    );
                }
                had_fault = true;
                RETRY_EVERY
            }
        };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = current.closed() => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_replica_reads_the_same_user() {
        let one = |text: &str| vec![text.to_owned()];
        let extra = [("scopes.example/A b", "x"), ("ends%41", "y"), ("é", "z"), ("", "")];
        let person = Person {
            name: "jane".to_owned(),
            uid: Some("7".to_owned()),
            groups: vec!["people".to_owned(), "Ops".to_owned()],
            extra: extra.map(|(key, value)| (key.to_owned(), one(value))).into(),
        };
        let mut headers = HeaderMap::new();
        headers.insert("x-remote-group", HeaderValue::from_static("system:masters"));
        headers.insert(CONNECTION, HeaderValue::from_static("x-remote-extra-scopes"));
        assert!(name_to_replica(&mut headers, &person));
        let unreadable = HeaderValue::from_bytes(b"\xff").unwrap();
        headers.insert("x-remote-extra-unreadable", unreadable);
        assert_eq!(named_by_replica(&headers), Some(person));
        assert!(!headers.contains_key(CONNECTION), "it could take away the others");
        // Less of him could be more rights: an attribute may say that he has not all of his user's.
        let extra = [("scopes".to_owned(), one("few\nmore"))].into();
        assert!(!name_to_replica(&mut headers, &Person { extra, ..Person::default() }));
    }
}
