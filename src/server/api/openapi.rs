//! The OpenAPI document of `/v1`, made from the handlers and the types of [`crate::api`] and
//! [`crate::report::wire`].

use utoipa::OpenApi;

use crate::api::page::NodeCell;
use crate::api::top::{DeviceList, NodeList, TenantList};
use crate::server::api::{queries, server};
use crate::server::page::{routes, stream};

/// The HTTP API of the gpupack extender.
#[derive(Debug, OpenApi)]
#[openapi(
    info(
        title = "gpupack",
        description = "The HTTP API of the gpupack extender. There are no credentials: anyone who \
            reaches the port can use it. Every body but those of kube-scheduler begins with \
            `apiVersion`, and those for people with `kind`, too. Numbers are whole; a unit ends the key (`Mib`, \
            `Millionths`, `Seconds`). What is not known is left out."
    ),
    tags(
        (name = "people", description = "Queries of people, tools and the page"),
        (name = "page", description = "What only the page needs"),
        (name = "kube-scheduler", description = "The extender protocol"),
        (name = "agents", description = "Reports of the nodes"),
    ),
    paths(
        queries::state,
        queries::explain,
        queries::waiting_pods,
        queries::moves,
        queries::advise,
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
    ),
    components(schemas(NodeCell, NodeList, DeviceList, TenantList))
)]
pub struct Document;

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
        for name in document.split("#/components/schemas/").skip(1) {
            let (name, _) = name.split_once('"').unwrap();
            assert!(document.contains(&format!("\n      \"{name}\": {{")), "{name} is missing");
        }
    }

    #[test]
    fn every_route_of_v1_is_in_the_document_and_no_other() {
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
            path.starts_with("/v1/").then(|| format!("{method} {path}"))
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
