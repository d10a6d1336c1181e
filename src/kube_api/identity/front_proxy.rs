//! Who calls through the API server: it shows a certificate of its own and names the user in headers.
//! See "Configure the Aggregation Layer" in Kubernetes' docs.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use hyper::HeaderMap;
use hyper::header::HeaderValue;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client};
use percent_encoding::percent_decode_str;
use rustls::pki_types::CertificateDer;
use tokio::sync::watch;
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;

use crate::identity::people::Person;
use runtime::certificates::ClientCheck;

/// Where each API server writes how it proves itself.
const NAMESPACE: &str = "kube-system";
const NAME: &str = "extension-apiserver-authentication";

/// How often it is read again: its CA is renewed long before it ends.
const READ_EVERY: Duration = Duration::from_secs(60);

/// How soon it is read again after a failure.
const RETRY_EVERY: Duration = Duration::from_secs(5);

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
        let Some(ca) = value(map, "requestheader-client-ca-file") else { return Ok(None) };
        Ok(Some(Self {
            clients: ClientCheck::of_ca(ca.as_bytes())
                .map_err(|error| format!("`requestheader-client-ca-file`: {error}"))?,
            names: list(map, "requestheader-allowed-names")?,
            users: Headers {
                user: list(map, "requestheader-username-headers")?,
                uid: list(map, "requestheader-uid-headers")?,
                group: list(map, "requestheader-group-headers")?,
                extra: list(map, "requestheader-extra-headers-prefix")?,
            },
        }))
    }

    /// Whether a client with this certificate chain is the API server.
    pub fn is_api_server(&self, chain: &[CertificateDer<'static>]) -> bool {
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

fn value<'a>(map: &'a ConfigMap, key: &str) -> Option<&'a str> {
    map.data.as_ref()?.get(key).map(String::as_str)
}

fn list(map: &ConfigMap, key: &str) -> Result<Vec<String>, String> {
    let text = value(map, key).unwrap_or("[]");
    serde_json::from_str(text).map_err(|error| format!("`{key}`: {error}"))
}

impl Headers {
    fn person(&self, headers: &HeaderMap) -> Option<Person> {
        let name = texts(headers, &self.user).find(|name| !name.is_empty())?;
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
        let uid = texts(headers, &self.uid).next();
        Some(Person { name, uid, groups: texts(headers, &self.group).collect(), extra })
    }
}

/// The values of all these headers.
fn texts(headers: &HeaderMap, names: &[String]) -> impl Iterator<Item = String> {
    names.iter().flat_map(|name| headers.get_all(name.as_str())).filter_map(text)
}

/// A value, which is UTF-8 as the API server writes it.
fn text(value: &HeaderValue) -> Option<String> {
    String::from_utf8(value.as_bytes().to_vec()).ok()
}

/// Reads again and again how the API server proves itself.
pub fn follow(
    client: Client,
    current: watch::Sender<Option<Arc<FrontProxy>>>,
) -> BoxFuture<'static, ()> {
    Box::pin(async move {
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
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_user_is_read_from_the_headers_of_the_api_server() {
        let one = |text: &str| vec![text.to_owned()];
        let of = Headers {
            user: one("X-Remote-User"),
            uid: one("X-Remote-Uid"),
            group: one("X-Remote-Group"),
            extra: one("X-Remote-Extra-"),
        };
        let mut headers = HeaderMap::new();
        assert_eq!(of.person(&headers), None);
        for (name, value) in [
            ("x-remote-user", "jane"),
            ("x-remote-uid", "7"),
            ("x-remote-group", "people"),
            ("x-remote-group", "Ops"),
            ("x-remote-extra-scopes.example%2f%41%20b", "x"),
        ] {
            headers.append(name, HeaderValue::from_static(value));
        }
        let unreadable = HeaderValue::from_bytes(b"\xff").unwrap();
        headers.insert("x-remote-extra-unreadable", unreadable);
        let jane = Person {
            name: "jane".to_owned(),
            uid: Some("7".to_owned()),
            groups: vec!["people".to_owned(), "Ops".to_owned()],
            extra: [("scopes.example/A b".to_owned(), one("x"))].into(),
        };
        assert_eq!(of.person(&headers), Some(jane));
    }
}
