use axum::http::{HeaderValue, Uri};
use clap::Parser;
use tower::ServiceExt;

use super::*;
use wire::ids::PodUid;

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    args: DemoArgs,
}

fn parsed(line: &str) -> Result<DemoArgs, clap::Error> {
    let words = std::iter::once("demo").chain(line.split_whitespace());
    Command::try_parse_from(words).map(|command| command.args)
}

#[test]
fn amounts_have_defaults_and_limits() {
    let args = parsed("").unwrap();
    assert_eq!((args.gpus(), args.fill.millionths()), (160, 750_000));
    for (text, millionths) in [("0", 0), ("0.0", 0), ("0.5", 500_000), ("1", 1_000_000)] {
        let args = parsed(&format!("--fill {text}")).unwrap();
        assert_eq!(args.fill.millionths(), millionths, "{text}");
    }
    for bad in [
        "--fill 1.5",
        "--fill -1",
        "--fill x",
        "--nodes 0",
        "--gpus-per-node 65",
        "--arrival-rate -1",
        "--arrival-rate nan",
        "--arrival-rate 1e-9",
        "--pods x",
        "--listen 8080",
        "--output xml",
        "-o xml",
    ] {
        assert!(parsed(bad).is_err(), "{bad}");
    }
}

#[test]
fn the_arrival_rate_of_pods_fits_the_fleet() {
    let arrivals = |line| parsed(line).unwrap().arrivals();
    let live = arrivals("");
    assert_eq!((live.pods, live.per_second, live.is_alive), (None, Some(4.0), true));
    assert_eq!(arrivals("--nodes 5000").per_second, Some(20.0));
    let once = arrivals("--once --pods 7");
    assert_eq!((once.pods, once.per_second, once.is_alive), (Some(7), None, false));
    assert_eq!(arrivals("--once").pods, Some(0));
    assert_eq!(arrivals("--arrival-rate 0").per_second, Some(0.0));
}

#[tokio::test]
async fn a_call_creates_its_pod_unless_a_page_of_another_site_may_have_made_it() {
    let api = ApiServer::default();
    let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let app = app(&parsed("").unwrap(), listen, &api, Clock::start());
    let routes = routes(Service::new(app, Arc::new(|_| Ok(()))), api.clone());
    let json = ("content-type", "application/json");
    for (uid, method, header, is_created) in [
        ("u1", Method::POST, ("content-type", "text/plain"), false),
        ("u2", Method::POST, ("origin", "http://evil.example"), false),
        ("u3", Method::POST, ("sec-fetch-site", "cross-site"), false),
        ("u4", Method::GET, json, false),
        ("u5", Method::POST, json, true),
    ] {
        let body = format!(
            r#"{{"Pod":{{"metadata":{{"namespace":"team","name":"{uid}","uid":"{uid}"}}}},"NodeNames":[]}}"#
        );
        let mut request = Request::new(Body::from(body));
        (*request.method_mut(), *request.uri_mut()) = (method, Uri::from_static("/v1/filter"));
        for (name, value) in [json, header] {
            request.headers_mut().insert(name, HeaderValue::from_static(value));
        }
        let answer = routes.clone().oneshot(request).await.unwrap();
        assert_eq!(answer.status().is_client_error(), !is_created, "{uid}");
        assert_eq!(api.pod(&PodUid::new(uid)).is_some(), is_created, "{uid}");
    }
}
