//! Requests that a page of another site makes a browser send. A browser reaches what its user
//! reaches, so everything that only such a page would request is refused.

use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;

use crate::http::respond::refusal;

/// Header of `gpupack`'s own requests. Behind the API server's service proxy, `Host` is the name of
/// that server, which is not known here. No page can make a browser send a header with this prefix.
pub const CLIENT_HEADER: &str = "sec-gpupack-client";

/// Host names of the service; `None` if they are not checked.
pub(crate) type Hosts = Option<Arc<[String]>>;

/// Passes a request on, unless a page of another site may have made it. Forbids browsers to guess
/// the content type of an answer.
pub(crate) async fn guard(State(hosts): State<Hosts>, request: Request, next: Next) -> Response {
    let refused = check(hosts.as_deref(), request.method(), &Caller::of(&request));
    let mut response = match refused {
        Ok(()) => next.run(request).await,
        Err((status, error)) => {
            tracing::debug!(%error, "a request is refused");
            refusal(status, &error)
        }
    };
    let nosniff = HeaderValue::from_static("nosniff");
    response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, nosniff);
    response
}

/// The parts of a request that say who makes it.
struct Caller<'a> {
    headers: &'a HeaderMap,
    /// From the request line. If it is there, the header `Host` is ignored.
    authority: Option<&'a Authority>,
}

impl<'a> Caller<'a> {
    fn of(request: &'a Request) -> Self {
        Self { headers: request.headers(), authority: request.uri().authority() }
    }

    /// The value of a header; an error if it occurs twice.
    fn one(&self, name: HeaderName) -> Result<Option<&'a str>, (StatusCode, String)> {
        let mut all = self.headers.get_all(&name).iter();
        let first = all.next().map(HeaderValue::to_str);
        match (first.transpose(), all.next()) {
            (Ok(value), None) => Ok(value),
            _ => Err((StatusCode::BAD_REQUEST, format!("header `{name}` cannot be read"))),
        }
    }

    /// The requested host as written; `None` if the client names none, which no browser does.
    fn host(&self) -> Result<Option<&'a str>, (StatusCode, String)> {
        let named = self.one(header::HOST)?;
        Ok(self.authority.map(Authority::as_str).or(named))
    }
}

/// Whether a request may go on; otherwise status and reason.
fn check(
    hosts: Option<&[String]>,
    method: &Method,
    caller: &Caller<'_>,
) -> Result<(), (StatusCode, String)> {
    let host = caller.host()?;
    if let (Some(hosts), Some(host)) = (hosts, host)
        && !caller.headers.contains_key(CLIENT_HEADER)
        && !is_allowed(hosts, host)
    {
        let shown: String = host.chars().take(253).collect();
        let error = format!(
            "host `{shown}` is not known here: call it by address, or add it to `allowed_hosts`"
        );
        return Err((StatusCode::MISDIRECTED_REQUEST, error));
    }
    let value = |name| caller.one(HeaderName::from_static(name));
    let is_navigation = method == Method::GET
        && value("sec-fetch-mode")? == Some("navigate")
        && value("sec-fetch-dest")? == Some("document");
    let site = value("sec-fetch-site")?;
    let is_cross_site = matches!(site, Some("cross-site" | "same-site"));
    // Browsers name the origin of scripts of the page itself. Behind the API server `Host` is another one.
    let origin = caller.one(header::ORIGIN)?.filter(|_| site != Some("same-origin"));
    let is_foreign = origin.is_some_and(|origin| {
        let of = origin.split_once("://").map(|(_, of)| of);
        !of.zip(host).is_some_and(|(of, host)| of.eq_ignore_ascii_case(host))
    });
    if (is_cross_site && !is_navigation) || is_foreign {
        return Err((StatusCode::FORBIDDEN, "pages of other sites may not call this".to_owned()));
    }
    let kind = caller.one(header::CONTENT_TYPE)?.unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim();
    let needs_json = [Method::POST, Method::PUT].contains(method);
    if needs_json && !kind.eq_ignore_ascii_case("application/json") {
        let error = "send it as `Content-Type: application/json`";
        return Err((StatusCode::UNSUPPORTED_MEDIA_TYPE, error.to_owned()));
    }
    Ok(())
}

/// Whether the host is an address, this machine, or one of `hosts`; the port does not matter. An
/// address is safe: another site's page has a name, and keeps it if that resolves to this address.
fn is_allowed(hosts: &[String], host: &str) -> bool {
    let end = if host.starts_with('[') { host.find(']').map(|at| at + 1) } else { host.find(':') };
    let (name, port) = host.split_at(end.unwrap_or(host.len()));
    let digits = if port.is_empty() { Some(port) } else { port.strip_prefix(':') };
    if digits.is_none_or(|digits| !digits.bytes().all(|digit| digit.is_ascii_digit())) {
        return false;
    }
    if let Some(address) = name.strip_prefix('[') {
        let address = address.strip_suffix(']').map(str::parse::<Ipv6Addr>);
        return address.is_some_and(|address| address.is_ok());
    }
    let name = name.to_ascii_lowercase();
    let name = name.strip_suffix('.').unwrap_or(&name);
    name.parse::<IpAddr>().is_ok() || name == "localhost" || hosts.iter().any(|host| host == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answered(method: &str, headers: &[(&'static str, &str)]) -> u16 {
        let mut request = axum::http::Request::builder().method(method).uri("/");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(axum::body::Body::empty()).unwrap();
        let hosts = ["gpupack.gpu-system.svc".to_owned()];
        let checked = check(Some(&hosts), request.method(), &Caller::of(&request));
        checked.map_or_else(|(status, _)| status.as_u16(), |()| 200)
    }

    #[test]
    fn a_host_is_an_address_localhost_or_a_listed_name() {
        for host in [
            "127.0.0.1:8080",
            "10.1.2.3",
            "[::1]:8080",
            "[fd00::1]",
            "localhost:1",
            "localhost:",
            "LocalHost",
            "gpupack.gpu-system.svc:8080",
            "GPUPACK.gpu-system.svc.",
        ] {
            assert_eq!(answered("GET", &[("host", host)]), 200, "{host}");
        }
        for host in [
            "evil.example:8080",
            "gpupack.gpu-system.svc.evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "[evil]",
            "",
            "1.2.3",
            "[::1].evil.example",
            "[::1]evil.example:80",
            "[::1",
            "[::1]:80:80",
            "localhost:evil.example",
            "localhost:80.evil.example",
            "localhost:80:80",
            "127.0.0.1:evil.example",
            "localhost:-1",
        ] {
            assert_eq!(answered("GET", &[("host", host)]), 421, "{host}");
            let own = answered("GET", &[("host", host), (CLIENT_HEADER, "gpupack")]);
            assert_eq!(own, 200, "no browser sends that header");
        }
        assert_eq!(answered("GET", &[]), 200, "no browser leaves it out");
        assert_eq!(answered("GET", &[("host", "10.0.0.1"), ("host", "evil.example")]), 400);
    }

    #[test]
    fn the_request_line_counts_before_its_headers() {
        let request = Request::get("http://evil.example/").header("host", "localhost");
        let request = request.body(axum::body::Body::empty()).unwrap();
        assert!(check(Some(&[]), &Method::GET, &Caller::of(&request)).is_err());
    }

    #[test]
    fn pages_of_other_sites_may_only_link_here() {
        let host = ("host", "localhost:8081");
        let document = [("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "document")];
        for site in ["cross-site", "same-site"] {
            let site = ("sec-fetch-site", site);
            assert_eq!(answered("GET", &[host, site]), 403);
            assert_eq!(answered("GET", &[host, site, document[0], document[1]]), 200, "a link");
            let frame = ("sec-fetch-dest", "iframe");
            assert_eq!(answered("GET", &[host, site, document[0], frame]), 403);
            let json = ("content-type", "application/json");
            assert_eq!(answered("POST", &[host, site, document[0], document[1], json]), 403);
        }
        for site in ["same-origin", "none"] {
            assert_eq!(answered("GET", &[host, ("sec-fetch-site", site)]), 200);
        }
        for (origin, status) in [
            ("http://localhost:8081", 200),
            ("http://LOCALHOST:8081", 200),
            ("http://localhost:9", 403),
            ("http://evil.example", 403),
            ("null", 403),
        ] {
            assert_eq!(answered("GET", &[host, ("origin", origin)]), status, "{origin}");
        }
        let proxied = [host, ("origin", "https://api.example:6443")];
        for (site, status) in [("same-origin", 200), ("none", 403), ("cross-site", 403)] {
            let headers = [proxied[0], proxied[1], ("sec-fetch-site", site)];
            assert_eq!(answered("GET", &headers), status, "through the API server: {site}");
        }
    }

    #[test]
    fn requests_that_change_state_must_be_json() {
        for (kind, status) in [
            ("application/json", 200),
            ("Application/JSON; charset=utf-8", 200),
            ("text/plain", 415),
            ("application/x-www-form-urlencoded", 415),
            ("text/plain; application/json", 415),
            ("application/jsonx", 415),
        ] {
            for method in ["POST", "PUT"] {
                assert_eq!(answered(method, &[("content-type", kind)]), status, "{kind}");
            }
        }
        assert_eq!(answered("POST", &[]), 415);
        assert_eq!(answered("GET", &[]), 200);
    }
}
