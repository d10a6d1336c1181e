//! What teams may have: refusals, what is shown of them, and to whom.

#![expect(clippy::unwrap_used, reason = "a failed unwrap in a test is the finding")]

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::http::StatusCode;
use engine::ledger::change::facts::PodFact;
use kube_api::pod::seen_pod::SeenPod;
use serde_json::{Value, json};
use server::views::teams::list;
use server::views::viewer::Viewer;
use wire::api::explain::Explanation;
use wire::api::page::{Summary, TeamList};
use wire::api::waiting::Obstacle;

use crate::harness::extender::{Bed, is_declared, pod, read};

const SHARES: &str =
    "shares: {teams: {team: {guaranteed: 0.5, at_most: 1}, idle: {guaranteed: 1}}}";

fn call(uid: &str, fraction: &str) -> Value {
    let pod = pod(uid, json!({"gpu-fraction": fraction}));
    json!({"Pod": pod, "NodeNames": ["gpu-a", "gpu-b", "gpu-c"]})
}

/// As if the API server showed this pod on `gpu-b`.
fn place(bed: &Bed, uid: &str, fraction: &str) {
    let query = read(&call(uid, fraction).to_string().into_bytes());
    let seen = SeenPod::from_json(&query["Pod"].to_string()).unwrap();
    let request = seen.request.clone().unwrap().map(Arc::new);
    let query = bed.app.query(&seen).unwrap();
    let now = bed.app.clock.now();
    let placement = bed.app.ledger.reserve(&seen.pod, "gpu-b", &query, now).unwrap();
    let fact = PodFact {
        node: Some(placement.node.clone()),
        placement: Some(placement),
        ..seen.fact(request)
    };
    bed.app.ledger.see_pod(&fact, now);
}

#[tokio::test]
async fn a_pod_beyond_the_limit_is_refused_everywhere_and_told_why() {
    let bed = Bed::warm_with(SHARES).await;
    place(&bed, "first", "0.75");
    let (status, answer) = bed.post("/v1/filter", call("small", "0.25").to_string()).await;
    assert_eq!((status, answer["NodeNames"].as_array().unwrap().len()), (StatusCode::OK, 3));
    let (_, answer) = bed.post("/v1/filter", call("large", "0.26").to_string()).await;
    assert_eq!(answer["NodeNames"], json!([]));
    let failed = answer["FailedAndUnresolvableNodes"].as_object().unwrap();
    assert_eq!(failed.len(), 3);
    assert!(failed.values().all(|why| why == "GPU limit of the team reached"), "{failed:?}");
    let (_, explained) = bed.get("/v1/explain?pod=team/large").await;
    let explained: Explanation = is_declared(explained.as_bytes());
    assert_eq!(explained.blocked_by, Some(Obstacle::Team));
    assert!(explained.verdict.contains("team `team` may have 0.25 GPU more"), "{explained:?}");
    assert!(explained.suggestions.iter().any(|it| it.contains("`at_most`")), "{explained:?}");
}

#[tokio::test]
async fn teams_are_shown_with_their_pods_and_only_to_those_who_see_a_namespace() {
    let bed = Bed::warm_with(SHARES).await;
    place(&bed, "first", "0.5");
    place(&bed, "second", "0.25");
    bed.post("/v1/filter", call("third", "0.5").to_string()).await;
    let (_, teams) = bed.get("/v1/teams").await;
    let teams: TeamList = is_declared(teams.as_bytes());
    let shown: Vec<_> = teams
        .items
        .iter()
        .map(|it| (&*it.team, it.guaranteed_millionths, it.at_most_millionths, it.used_millionths))
        .collect();
    assert_eq!(shown, [("idle", 1_000_000, None, 0), ("team", 500_000, Some(1_000_000), 750_000)]);
    let team = &teams.items[1];
    assert_eq!((team.over_quota_millionths, team.pods, team.waiting), (250_000, 2, 1));
    let (_, summary) = bed.get("/v1/summary").await;
    let summary: Summary<'_> = serde_json::from_str(&summary).unwrap();
    assert_eq!(summary.figures.teams, teams.items);
    let (_, metrics) = bed.get("/metrics").await;
    for line in [
        r#"gpupack_team_gpus{kind="used",team="team"} 0.75"#,
        r#"gpupack_team_gpus{kind="over_quota",team="team"} 0.25"#,
        r#"gpupack_team_gpus{kind="guaranteed",team="idle"} 1"#,
        r#"gpupack_team_waiting_pods{team="team"} 1"#,
    ] {
        assert!(metrics.contains(line), "{line}");
    }
    for (namespaces, expected) in [(&["team"][..], &["team"][..]), (&["other"], &[])] {
        let namespaces: BTreeSet<String> = namespaces.iter().map(ToString::to_string).collect();
        let viewer = Viewer::Namespaces(Arc::new(namespaces));
        let seen = list(&bed.app, &viewer);
        assert!(seen.items.iter().map(|team| &*team.team).eq(expected.iter().copied()));
    }
    let (_, explained) = bed.get("/v1/explain?pod=team/second").await;
    let explained: Explanation = is_declared(explained.as_bytes());
    assert!(explained.verdict.contains("may be evicted"), "{explained:?}");
}

#[tokio::test]
async fn without_shares_there_are_no_teams() {
    let bed = Bed::warm().await;
    let (_, teams) = bed.get("/v1/teams").await;
    assert_eq!(is_declared::<TeamList>(teams.as_bytes()).items, []);
}
