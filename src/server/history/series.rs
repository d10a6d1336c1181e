//! Queries to a Prometheus over plain HTTP. Its answers are checked and not trusted.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use axum::http::header::{ACCEPT, CONTENT_TYPE};
use axum::http::{Request, StatusCode};
use bytes::Bytes;
use http_body_util::Full;
use serde::Deserialize;

use runtime::http_client::HttpClient;

/// Limit for one answer, also sent to Prometheus as its own timeout.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Largest answer that is read: three times the expected size.
const MAX_ANSWER_BYTES: usize = 16 << 20;

/// Characters of an error message of Prometheus that are shown.
const MAX_WORDS: usize = 200;

/// Timestamps at equal distance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moments {
    /// The last one, in seconds since 1970.
    pub last: u64,
    /// Seconds from one to the next.
    pub every: u64,
    pub count: usize,
}

impl Moments {
    /// The first one.
    fn first(&self) -> u64 {
        let steps = u64::try_from(self.count.saturating_sub(1)).unwrap_or(u64::MAX);
        self.last.saturating_sub(steps.saturating_mul(self.every))
    }

    /// The index of a time; `None` if it is none of them.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "in range")]
    fn position(&self, time: f64) -> Option<usize> {
        if time.fract() != 0.0 || !(0.0..9e15).contains(&time) {
            return None;
        }
        let since = (time as u64).checked_sub(self.first())?;
        let position = usize::try_from(since / self.every.max(1)).ok()?;
        (since.is_multiple_of(self.every.max(1)) && position < self.count).then_some(position)
    }
}

/// The content of an answer: the values of each series at each timestamp, by the label `uid`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SeriesValues {
    /// Finite values of at least zero; `None` where a value is missing.
    pub series: BTreeMap<String, Vec<Option<f64>>>,
    /// Invalid values: no number, below zero, at another timestamp, or of another pod.
    pub absurd: usize,
}

/// A client for one Prometheus.
#[derive(Debug)]
pub(crate) struct Prometheus {
    address: String,
    http: HttpClient,
}

impl Prometheus {
    /// The Prometheus at an address without a final slash. It connects at the first query.
    pub(crate) fn new(address: &str) -> Self {
        Self { address: address.to_owned(), http: HttpClient::new(TIMEOUT, MAX_ANSWER_BYTES) }
    }

    /// The body of the answer to an expression at all timestamps.
    ///
    /// # Errors
    /// No answer in time, an answer that is too large, or a refusal, as text.
    pub(crate) async fn ask(&self, expression: &str, at: &Moments) -> Result<Bytes, String> {
        let form = [
            ("query", expression.to_owned()),
            ("start", at.first().to_string()),
            ("end", at.last.to_string()),
            ("step", at.every.to_string()),
            ("timeout", format!("{}s", TIMEOUT.as_secs())),
        ];
        let pairs: Vec<String> =
            form.iter().map(|(key, value)| format!("{key}={}", encoded(value))).collect();
        let request = Request::post(format!("{}/api/v1/query_range", self.address))
            .header(CONTENT_TYPE, "application/x-www-form-urlencoded")
            .header(ACCEPT, "application/json")
            .body(Full::new(Bytes::from(pairs.join("&"))))
            .map_err(|error| error.to_string())?;
        let (status, body) = self.http.exchange(request).await?;
        if status == StatusCode::OK {
            return Ok(body);
        }
        let said = serde_json::from_slice::<Answer>(&body).ok().and_then(|answer| answer.error);
        Err(format!("status {status}{}", said.map_or(String::new(), |said| words(&said))))
    }
}

/// What Prometheus answers.
#[derive(Deserialize)]
struct Answer {
    status: String,
    error: Option<String>,
    data: Option<Data>,
}

#[derive(Deserialize)]
struct Data {
    #[serde(rename = "resultType")]
    kind: String,
    result: Vec<Series>,
}

#[derive(Deserialize)]
struct Series {
    metric: Labels,
    values: Vec<(f64, String)>,
}

#[derive(Deserialize)]
struct Labels {
    #[serde(default)]
    uid: String,
}

/// Reads an answer about `wanted`.
///
/// # Errors
/// The body is no answer of Prometheus, or of another kind, as text.
pub fn read(body: &[u8], at: &Moments, wanted: &BTreeSet<&str>) -> Result<SeriesValues, String> {
    let answer: Answer = serde_json::from_slice(body)
        .map_err(|error| format!("it is none of Prometheus: {error}"))?;
    let data = match answer.data {
        Some(data) if answer.status == "success" && data.kind == "matrix" => data,
        Some(data) => return Err(format!("a matrix was requested, not{}", words(&data.kind))),
        None => return Err(format!("no data{}", words(&answer.error.unwrap_or_default()))),
    };
    let mut found = SeriesValues::default();
    for series in data.result {
        if !wanted.contains(series.metric.uid.as_str()) {
            found.absurd += series.values.len();
            continue;
        }
        let values = found.series.entry(series.metric.uid).or_insert_with(|| vec![None; at.count]);
        for (time, value) in series.values {
            let value = value.parse().ok().filter(|value: &f64| value.is_finite() && *value >= 0.0);
            match at.position(time).zip(value) {
                Some((position, value)) => values[position] = Some(value),
                None => found.absurd += 1,
            }
        }
    }
    Ok(found)
}

/// Text of another process, made short and safe for a log.
fn words(said: &str) -> String {
    if said.is_empty() {
        return String::new();
    }
    let short: String = said.chars().take(MAX_WORDS).collect();
    format!(": {short:?}")
}

/// A value in form encoding.
fn encoded(text: &str) -> String {
    let encoded = text.bytes().map(|byte| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => char::from(byte).to_string(),
        byte => format!("%{byte:02X}"),
    });
    encoded.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: Moments = Moments { last: 1_000, every: 300, count: 3 };

    fn answer(result: &str) -> Result<SeriesValues, String> {
        let body =
            format!(r#"{{"status":"success","data":{{"resultType":"matrix","result":{result}}}}}"#);
        read(body.as_bytes(), &AT, &BTreeSet::from(["u1", "u2"]))
    }

    #[test]
    fn values_are_plotted_at_their_times() {
        let found = answer(
            r#"[{"metric":{"uid":"u1"},"values":[[400,"1.5e+09"],[1000,"0"]]},
                {"metric":{"uid":"u2"},"values":[[700.0,"7"]]}]"#,
        );
        let found = found.unwrap();
        assert_eq!(found.series["u1"], [Some(1.5e9), None, Some(0.0)]);
        assert_eq!(found.series["u2"], [None, Some(7.0), None]);
        assert_eq!(found.absurd, 0);
    }

    #[test]
    fn false_values_are_ignored_and_counted() {
        for (result, absurd) in [
            (r#"[{"metric":{"uid":"u1"},"values":[[400,"NaN"],[700,"-1"],[1000,"+Inf"]]}]"#, 3),
            (r#"[{"metric":{"uid":"u1"},"values":[[400,""],[700,"1 GiB"]]}]"#, 2),
            (r#"[{"metric":{"uid":"u1"},"values":[[399,"1"],[1300,"1"],[-1e300,"1"]]}]"#, 3),
            (r#"[{"metric":{"uid":"stranger"},"values":[[400,"1"]]}]"#, 1),
            (r#"[{"metric":{},"values":[[400,"1"],[700,"1"]]}]"#, 2),
        ] {
            let found = answer(result).unwrap();
            assert_eq!(found.absurd, absurd, "{result}");
            assert!(found.series.values().flatten().all(Option::is_none), "{result}");
        }
    }

    #[test]
    fn invalid_answers_are_rejected_with_a_message() {
        let deep = "[".repeat(100_000);
        for (body, said) in [
            ("", "none of Prometheus"),
            ("<html>", "none of Prometheus"),
            (deep.as_str(), "none of Prometheus"),
            (r#"{"status":"success"}"#, "no data"),
            (
                "{\"status\":\"error\",\"error\":\"too \\u001b[2J many\"}",
                r#"no data: "too \u{1b}[2J many""#,
            ),
            (
                r#"{"status":"success","data":{"resultType":"vector","result":[]}}"#,
                "not: \"vector\"",
            ),
            (
                r#"{"status":"success","data":{"resultType":"matrix","result":[{"metric":{"uid":7}}]}}"#,
                "none of",
            ),
            (
                r#"{"status":"success","data":{"resultType":"matrix","result":[{"metric":{},"value":[1,"2"]}]}}"#,
                "none of",
            ),
        ] {
            let refused = read(body.as_bytes(), &AT, &BTreeSet::new()).unwrap_err();
            assert!(refused.contains(said) && refused.len() < 400, "{refused}");
        }
    }

    #[test]
    fn form_decoding_accepts_every_letter() {
        assert_eq!(
            encoded("a-1{b=~\"c|d\"}[5m] ü"),
            "a-1%7Bb%3D~%22c%7Cd%22%7D%5B5m%5D%20%C3%BC".replace('~', "%7E")
        );
    }
}
