//! A Binding whose caller timed out: kube-scheduler gives the pod's CPU and memory to others again.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::api::PostParams;

use crate::clock;
use crate::fleet::{A100, Fleet};
use crate::pods::PodPlan;
use crate::proxy::Faults;
use crate::testbed::{Setup, Stage, scenario};
use crate::watching::{bound, is_bound};

/// kube-scheduler's `httpTimeout`, as shipped, and a moment for what it does then.
const GIVEN_UP_AFTER: Duration = Duration::from_millis(10_300);

#[test]
fn an_abandoned_bind_is_not_posted_again() {
    scenario("given-up", |bed| async move {
        // No Binding arrives in time: each is undecided after 5 s, when its caller would no longer get an answer in time.
        let held =
            Faults { hold_percent: 100, delay: Duration::from_secs(60), ..Faults::default() };
        let mut fleet = Fleet::new().with("given-up", 1, (1, A100));
        fleet.nodes[0].cpu_milli = 4_000;
        let setup = Setup { faults: Some((held, 1)), ..Setup::of(fleet) };
        let stage = bed.stage(setup).await;
        add(&stage, "first").await;
        let proxy = stage.proxy.as_ref().expect("the scenario has a proxy");
        let started = clock::now();
        while proxy.harm().held == 0 {
            assert!(started.elapsed() < Duration::from_secs(10), "no Binding was posted");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        tokio::time::sleep(GIVEN_UP_AFTER).await;
        proxy.set(Faults::default());
        add(&stage, "second").await;
        stage.watching.until_bound(1, Duration::from_secs(30)).await;
        // The next attempt of the first bind would come 10 s after its first.
        tokio::time::sleep(Duration::from_secs(8)).await;
        let names = ["first", "second"];
        let winners: Vec<&str> = stage
            .watching
            .ask(|pods| names.into_iter().filter(|pod| is_bound(pods, pod)).collect());
        stage.figure(&format!("bound: {winners:?}; {:?}", proxy.harm()));
        assert_eq!(stage.watching.ask(bound), 1, "two pods of 3 CPUs are bound to a node of 4");
        stage.judge().await;
    });
}

/// A pod with a quarter of a GPU and 3 CPUs.
async fn add(stage: &Stage, name: &str) {
    let mut pod = PodPlan::fraction(name, "0.25").to_pod();
    let container = &mut pod.spec.as_mut().expect("a pod has a spec").containers[0];
    let requests = container.resources.get_or_insert_default().requests.get_or_insert_default();
    requests.insert("cpu".to_owned(), Quantity("3".to_owned()));
    let created = stage.cluster.pods().create(&PostParams::default(), &pod).await;
    created.unwrap_or_else(|error| panic!("cannot create {name}: {error}"));
}
