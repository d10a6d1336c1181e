//! The OpenAPI document of `/v1`, made from the handlers and the types of [`wire::api`] and
//! [`wire::report::bodies`].

use utoipa::openapi::{Content, Ref, ResponseBuilder};
use utoipa::{Modify, OpenApi};

use crate::api::{clears, queries, replicas, server};
use crate::page::{routes, stream};
use wire::api::commands::{DemoSummary, DeviceList, NodeList, TenantList};
use wire::api::page::NodeCell;

/// The HTTP API of the gpupack extender.
#[derive(Debug, OpenApi)]
#[openapi(
    info(
        title = "gpupack",
        description = "The HTTP API of the gpupack extender. Who may call \
            what, `docs/api.md` says. Every JSON body but those of kube-scheduler's calls begins \
            with `apiVersion` and `kind`. Numbers are whole; a unit ends the key (`Mib`, \
            `Millionths`, `Seconds`). What is not known is left out."
    ),
    tags(
        (name = "people", description = "Queries of people, tools and the page"),
        (name = "page", description = "The content of the page, and its changes"),
        (name = "kube-scheduler", description = "The extender protocol"),
        (name = "agents", description = "Reports of the nodes"),
        (name = "monitoring", description = "Probes of kubelet, and Prometheus"),
    ),
    paths(
        queries::state,
        queries::explain,
        queries::waiting_pods,
        queries::teams,
        queries::moves,
        queries::advise,
        clears::clear,
        routes::summary,
        stream::events,
        routes::fit,
        routes::fragmentation,
        routes::search,
        server::log_level,
        server::filter,
        server::prioritize,
        server::preempt,
        server::bind_pod,
        server::take_report,
        server::library,
        replicas::bindings,
        replicas::join,
        server::alive,
        server::ready,
        server::metrics,
        server::device_metrics,
    ),
    components(schemas(NodeCell, NodeList, DeviceList, TenantList, DemoSummary)),
    modifiers(&SharedRefusals)
)]
pub struct Document;

/// Adds the refusals that every operation may give.
struct SharedRefusals;

/// Status, name and description of those that any operation may give.
const OF_ALL: [(&str, &str, &str); 3] = [
    ("403", "OtherSite", "A page of another site makes the browser call."),
    ("421", "UnknownHost", "`Host` is a name that is not in `allowed_hosts`."),
    ("503", "TryLater", "Too much at once: try again later."),
];

/// The same for operations that read a body.
const OF_BODIES: [(&str, &str, &str); 2] = [
    ("413", "TooLong", "The body is longer than this path reads."),
    ("415", "NotJson", "`Content-Type` is not `application/json`."),
];

impl Modify for SharedRefusals {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        for item in document.paths.paths.values_mut() {
            for operation in [&mut item.get, &mut item.put, &mut item.post].into_iter().flatten() {
                let has_body = operation.request_body.is_some();
                let of_bodies = OF_BODIES.into_iter().filter(|_| has_body);
                for (status, name, _) in OF_ALL.into_iter().chain(of_bodies) {
                    let responses = &mut operation.responses.responses;
                    responses
                        .entry(status.to_owned())
                        .or_insert_with(|| Ref::from_response_name(name).into());
                }
            }
        }
        let components = document.components.get_or_insert_default();
        for (_, name, description) in OF_ALL.into_iter().chain(OF_BODIES) {
            let error = Content::new(Some(Ref::from_schema_name("Error")));
            let response = ResponseBuilder::new().description(description);
            let response = response.content("application/json", error).build();
            components.responses.insert(name.to_owned(), response.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use expect_test::expect_file;

    use super::*;

    #[test]
    fn the_document_in_the_repository_is_that_of_the_types() {
        // After a change: UPDATE_EXPECT=1 cargo test --lib openapi
        let document = Document::openapi().to_pretty_json().unwrap() + "\n";
        expect_file!["../../../docs/openapi.json"].assert_eq(&document);
        for name in document.split("#/components/").skip(1) {
            let (_, name) = name.split_once('"').unwrap().0.split_once('/').unwrap();
            assert!(document.contains(&format!("\n      \"{name}\": {{")), "{name} is missing");
        }
        for rust in ["`None`", "[`", "::"] {
            assert!(!document.contains(rust), "{rust} means nothing to a client");
        }
    }

    #[test]
    fn every_route_but_the_page_is_in_the_document_and_no_other() {
        let document = Document::openapi();
        let files = [
            include_str!("server.rs"),
            include_str!("queries.rs"),
            include_str!("../page/routes.rs"),
        ];
        let routes = files.iter().flat_map(|text| text.split(".route(\"").skip(1));
        let routes = routes.filter_map(|rest| {
            let (path, rest) = rest.split_once('"')?;
            let method = rest.trim_start_matches([',', ' ']).split('(').next()?;
            (path != "/" && path != "/page/{file}").then(|| format!("{method} {path}"))
        });
        let routes: BTreeSet<String> = routes.collect();
        let mut documented = BTreeSet::new();
        for (path, item) in document.paths.paths {
            let methods = [("get", item.get), ("post", item.post), ("put", item.put)];
            let there = methods.into_iter().filter(|(_, operation)| operation.is_some());
            documented.extend(there.map(|(method, _)| format!("{method} {path}")));
        }
        assert_eq!(documented, routes);
        assert!(routes.len() > 15, "{routes:?}");
    }
}
