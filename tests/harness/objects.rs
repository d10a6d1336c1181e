//! A fake API server that keeps any objects: versions, conflicts, and faults by script.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, UNIX_EPOCH};

use hyper::{Method, Request, Response};
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};

/// What goes wrong with a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WriteFault {
    /// Nothing.
    None,
    /// It is refused with this status.
    Refused(u16),
    /// Another client writes the object just before.
    WrittenBefore,
    /// It is done, and the connection breaks.
    CutAfter,
    /// The connection breaks before it is done.
    CutBefore,
}

#[derive(Default)]
struct Stored {
    objects: BTreeMap<String, Value>,
    version: u64,
    faults: VecDeque<WriteFault>,
    /// Paths that are refused with 403.
    forbidden: Vec<String>,
    /// Its clock in seconds since 1970, if it says what time it is.
    date: Option<u64>,
    writes: Vec<String>,
}

/// The fake API server. Objects are named by their paths.
#[derive(Clone, Default)]
pub(crate) struct Objects(Arc<Mutex<Stored>>);

impl Objects {
    fn stored<T>(&self, act: impl FnOnce(&mut Stored) -> T) -> T {
        act(&mut self.0.lock().expect("no test panics in it"))
    }

    /// Creates or replaces an object.
    pub(crate) fn put(&self, path: &str, object: Value) {
        self.stored(|stored| {
            let mut object = object;
            stored.version += 1;
            object["metadata"]["resourceVersion"] = stored.version.to_string().into();
            stored.objects.insert(path.to_owned(), object);
        });
    }

    /// The object, as it is.
    pub(crate) fn at(&self, path: &str) -> Value {
        self.stored(|stored| stored.objects.get(path).cloned().unwrap_or_default())
    }

    /// Deletes an object.
    pub(crate) fn remove(&self, path: &str) {
        self.stored(|stored| stored.objects.remove(path));
    }

    /// What goes wrong with the next writes, in this order.
    pub(crate) fn fail(&self, faults: &[WriteFault]) {
        self.stored(|stored| stored.faults.extend(faults));
    }

    /// Writes to this path are refused from now on.
    pub(crate) fn forbid(&self, path: &str) {
        self.stored(|stored| stored.forbidden.push(path.to_owned()));
    }

    /// Writes to this path are refused no longer.
    pub(crate) fn permit(&self, path: &str) {
        self.stored(|stored| stored.forbidden.retain(|it| it != path));
    }

    /// Answers say from now on that it is this late.
    pub(crate) fn is_at(&self, unix_seconds: u64) {
        self.stored(|stored| stored.date = Some(unix_seconds));
    }

    /// All writes so far, as method and path.
    pub(crate) fn writes(&self) -> Vec<String> {
        self.stored(|stored| stored.writes.clone())
    }

    pub(crate) fn client(&self) -> Client {
        let all = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let all = all.clone();
            async move { all.answer(request).await }
        });
        Client::new(service, "default")
    }

    async fn answer(&self, request: Request<Body>) -> Result<Response<Body>, io::Error> {
        // Others get their turn at each call.
        tokio::task::yield_now().await;
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        let by_name = request
            .headers()
            .get("content-type")
            .is_some_and(|kind| kind == "application/strategic-merge-patch+json");
        let body = request.into_body().collect_bytes().await.expect("a body in memory");
        let body: Value = serde_json::from_slice(&body).unwrap_or_default();
        self.stored(|stored| {
            let mut answer = stored.answer(&method, &path, body, by_name)?;
            if let Some(date) = stored.date {
                let date = httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_secs(date));
                let date = date.parse().expect("a date is the value of a header");
                answer.headers_mut().insert("date", date);
            }
            Ok(answer)
        })
    }
}

impl Stored {
    fn answer(
        &mut self,
        method: &Method,
        path: &str,
        body: Value,
        by_name: bool,
    ) -> Result<Response<Body>, io::Error> {
        if method == Method::GET {
            return Ok(match self.objects.get(path) {
                Some(object) => response(200, object),
                None => refused(404),
            });
        }
        self.writes.push(format!("{method} {path}"));
        if self.forbidden.iter().any(|it| it == path) {
            return Ok(refused(403));
        }
        let fault = self.faults.pop_front().unwrap_or(WriteFault::None);
        let cut = || io::Error::from(io::ErrorKind::ConnectionReset);
        match fault {
            WriteFault::Refused(code) => return Ok(refused(code)),
            WriteFault::CutBefore => return Err(cut()),
            WriteFault::WrittenBefore => {
                self.version += 1;
                if let Some(object) = self.objects.get_mut(path) {
                    object["metadata"]["resourceVersion"] = self.version.to_string().into();
                }
            }
            WriteFault::None | WriteFault::CutAfter => {}
        }
        let Some(before) = self.objects.get(path).cloned() else { return Ok(refused(404)) };
        let version = &body["metadata"]["resourceVersion"];
        if version.is_null() || *version != before["metadata"]["resourceVersion"] {
            return Ok(refused(409));
        }
        let mut object = if *method == Method::PUT { body } else { merged(before, &body, by_name) };
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        self.objects.insert(path.to_owned(), object.clone());
        match fault {
            WriteFault::CutAfter => Err(cut()),
            _ => Ok(response(200, &object)),
        }
    }
}

/// A merge patch (RFC 7386). In a strategic one the items of lists are merged by their names.
fn merged(before: Value, patch: &Value, by_name: bool) -> Value {
    match (before, patch) {
        (Value::Object(mut before), Value::Object(patch)) => {
            for (key, value) in patch {
                let old = before.remove(key).unwrap_or_default();
                if !value.is_null() {
                    before.insert(key.clone(), merged(old, value, by_name));
                }
            }
            Value::Object(before)
        }
        (Value::Array(mut before), Value::Array(patch)) if by_name => {
            for item in patch {
                match before.iter_mut().find(|old| old["name"] == item["name"]) {
                    Some(old) => *old = merged(old.take(), item, by_name),
                    None => before.push(item.clone()),
                }
            }
            Value::Array(before)
        }
        (_, patch) => patch.clone(),
    }
}

fn response(code: u16, body: &Value) -> Response<Body> {
    let body = Body::from(body.to_string().into_bytes());
    Response::builder().status(code).body(body).expect("a fixed form")
}

fn refused(code: u16) -> Response<Body> {
    response(
        code,
        &json!({"kind": "Status", "status": "Failure", "code": code, "message": "scripted"}),
    )
}
