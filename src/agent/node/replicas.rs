//! Where the replicas of the extender are: the addresses in the configuration, and those that its names
//! resolve to.
//!
//! A name is resolved again and again, since a replica that starts has a new address. While it cannot
//! be resolved, the known addresses stay.

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use hyper::Uri;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::node::client::AddressError;
use runtime::http_client::address_with;

/// Time between two looks at a name.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Shortest time between two, while an extender is lost or none was ever found.
const LOOK_AT_MOST_EVERY: Duration = Duration::from_secs(1);

/// Most replicas of one name. Each has a link for each node.
const MOST_REPLICAS: usize = 16;

/// The port of an address without one.
const HTTP_PORT: u16 = 80;
const HTTPS_PORT: u16 = 443;

/// What a name resolves to.
type Addresses = io::Result<Vec<SocketAddr>>;

type Resolve = dyn Fn(String, u16) -> BoxFuture<'static, Addresses> + Send + Sync;

/// Resolves names. By default the system does.
#[derive(Clone)]
pub struct Resolver(Arc<Resolve>);

impl Resolver {
    /// Resolves a name with a port by this function.
    pub fn new(
        resolve: impl Fn(String, u16) -> BoxFuture<'static, Addresses> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(resolve))
    }
}

impl Default for Resolver {
    fn default() -> Self {
        Self::new(|host, port| {
            Box::pin(async move { Ok(tokio::net::lookup_host((host, port)).await?.collect()) })
        })
    }
}

impl fmt::Debug for Resolver {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("Resolver")
    }
}

/// One address of the configuration.
#[derive(Debug)]
pub(crate) struct ExtenderTarget {
    scheme: &'static str,
    host: String,
    port: u16,
    /// What stands before each path.
    prefix: String,
    /// The addresses that the name last resolved to.
    found: Mutex<BTreeSet<SocketAddr>>,
    /// Notified when it has to be resolved again soon.
    again: Notify,
}

impl ExtenderTarget {
    /// The target of `url`. An IP address is found at once, a name by [`ExtenderTarget::look`].
    ///
    /// # Errors
    /// [`AddressError`] if `url` is no address with this scheme.
    pub(crate) fn new(scheme: &'static str, url: &str) -> Result<Self, AddressError> {
        let base = address_with(scheme, url).map_err(AddressError)?;
        let address: Uri =
            base.parse().map_err(|error| AddressError(format!("`{base}`: {error}")))?;
        let host = address.host().unwrap_or_default();
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let port =
            address.port_u16().unwrap_or(if scheme == "https" { HTTPS_PORT } else { HTTP_PORT });
        let fixed = host.parse::<IpAddr>().map(|address| SocketAddr::new(address, port));
        let prefix = address.path().trim_end_matches('/').to_owned();
        let found = Mutex::new(fixed.into_iter().collect());
        Ok(Self { scheme, host, port, prefix, found, again: Notify::new() })
    }

    /// Whether it is a name.
    pub(crate) fn is_name(&self) -> bool {
        self.host.parse::<IpAddr>().is_err()
    }

    /// Has the name resolved again soon.
    pub(crate) fn look_again(&self) {
        self.again.notify_one();
    }

    /// The known replicas, as addresses of one family if there are any. A replica with two families has
    /// two addresses, and must have one link: with two each would end the session of the other.
    pub(crate) fn urls(&self, family: Family) -> BTreeSet<String> {
        let found = self.found.lock();
        let has_any = found.iter().any(|address| family.has(address));
        let chosen =
            found.iter().filter(|address| family.has(address) || !has_any).take(MOST_REPLICAS);
        let scheme = self.scheme;
        chosen.map(|address| format!("{scheme}://{address}{}", self.prefix)).collect()
    }

    /// Whether it has addresses of both families.
    pub(crate) fn is_dual(&self) -> bool {
        let found = self.found.lock();
        found.iter().any(SocketAddr::is_ipv4) && found.iter().any(SocketAddr::is_ipv6)
    }

    /// Resolves the name forever. `news` is rung when they change.
    pub(crate) async fn look(self: Arc<Self>, resolver: Resolver, news: Arc<Notify>) {
        let mut has_failed = false;
        loop {
            let resolved = (resolver.0)(self.host.clone(), self.port).await;
            let name = &self.host;
            let cause = match resolved {
                Ok(addresses) if !addresses.is_empty() => {
                    if self.learn(addresses.into_iter().collect()) {
                        news.notify_one();
                    }
                    None
                }
                Ok(_) => Some("it has no address".to_owned()),
                Err(error) => Some(error.to_string()),
            };
            match &cause {
                Some(cause) if !has_failed => tracing::warn!(
                    name,
                    cause,
                    "the extender's name cannot be resolved, its known addresses stay"
                ),
                None if has_failed => tracing::info!(name, "the extender's name resolves again"),
                Some(_) | None => {}
            }
            has_failed = cause.is_some();
            tokio::time::sleep(LOOK_AT_MOST_EVERY).await;
            let is_known = !self.found.lock().is_empty();
            if is_known {
                let rest = LOOK_EVERY.saturating_sub(LOOK_AT_MOST_EVERY);
                let _ = tokio::time::timeout(rest, self.again.notified()).await;
            }
        }
    }

    /// Notes the addresses. Returns whether they are news.
    fn learn(&self, addresses: BTreeSet<SocketAddr>) -> bool {
        let mut known = self.found.lock();
        let is_new = *known != addresses;
        *known = addresses;
        is_new
    }
}

/// A family of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    V4,
    V6,
}

impl Family {
    fn has(self, address: &SocketAddr) -> bool {
        address.is_ipv6() == (self == Self::V6)
    }

    pub(crate) fn other(self) -> Self {
        match self {
            Self::V4 => Self::V6,
            Self::V6 => Self::V4,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_fixed_and_a_name_is_not() {
        for (url, is_name, first) in [
            ("http://10.0.0.1:8080/", false, Some("http://10.0.0.1:8080")),
            ("http://10.0.0.1/gpu/pack/", false, Some("http://10.0.0.1:80/gpu/pack")),
            ("http://[fd00::1]:8080", false, Some("http://[fd00::1]:8080")),
            ("http://gpupack-replicas.gpu-system:8080", true, None),
        ] {
            let target = ExtenderTarget::new("http", url).unwrap();
            let found = target.urls(Family::V4).pop_first();
            assert_eq!((target.is_name(), found.as_deref()), (is_name, first), "{url}");
        }
        assert!(ExtenderTarget::new("http", "https://a").unwrap_err().to_string().contains("TLS"));
        assert!(ExtenderTarget::new("https", "http://a").unwrap_err().to_string().contains("TLS"));
        let target = ExtenderTarget::new("https", "https://10.0.0.1").unwrap();
        assert!(target.urls(Family::V4).contains("https://10.0.0.1:443"));
    }

    #[test]
    fn one_family_of_addresses_is_used_and_few_of_them() {
        let target = ExtenderTarget::new("http", "http://a:1/b").unwrap();
        let learn = |all: &[&str]| {
            target.learn(all.iter().map(|address| address.parse().unwrap()).collect())
        };
        let urls = |family| target.urls(family).into_iter().collect::<Vec<_>>().join(" ");
        assert!(learn(&["10.0.0.1:1", "[fd00::1]:1"]) && target.is_dual());
        assert!(!learn(&["[fd00::1]:1", "10.0.0.1:1"]), "no news");
        assert_eq!(urls(Family::V4), "http://10.0.0.1:1/b");
        assert_eq!(urls(Family::V4.other()), "http://[fd00::1]:1/b");
        assert!(learn(&["[fd00::1]:1"]) && !target.is_dual());
        assert_eq!(urls(Family::V4), "http://[fd00::1]:1/b", "the only one");
        let many: Vec<String> = (1..=40).map(|at| format!("10.0.0.{at}:1")).collect();
        learn(&many.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(target.urls(Family::V4).len(), MOST_REPLICAS);
    }
}
