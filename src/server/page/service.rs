//! State that the routes share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::http::StatusCode;
use axum::response::Response;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::http::respond::{refusal, work_with};
use crate::page::live::Live;
use control::shared::app::App;
use runtime::process::logging::SetLogLevel;

/// State of the routes.
#[derive(Clone)]
pub struct Service {
    pub app: Arc<App>,
    /// The content of the page.
    pub live: Arc<Live>,
    pub set_log_level: Arc<SetLogLevel>,
    /// Since when verbs come too early.
    pub(crate) early: Arc<Early>,
}

/// For how long verbs that come too early may wait together. kube-scheduler calls for one pod after the
/// other: if each one waited, an extender that does not become ready would hold up all of them.
#[derive(Default)]
pub(crate) struct Early(AtomicU64);

impl Early {
    /// Longest wait. A new leader makes late Bindings of the old one fail in less.
    const WITHIN: Duration = Duration::from_secs(2);

    /// Whether a call may still wait at `now`, on the precise clock.
    pub(crate) fn may_wait(&self, now: Duration) -> bool {
        let now = u64::try_from(now.as_millis()).unwrap_or(u64::MAX).max(1);
        let first = self.0.compare_exchange(0, now, Ordering::AcqRel, Ordering::Acquire);
        let since = first.map_or_else(|since| since, |_| now);
        Duration::from_millis(now.saturating_sub(since)) < Self::WITHIN
    }

    /// Notes that calls no longer come too early.
    pub(crate) fn end(&self) {
        if self.0.load(Ordering::Acquire) != 0 {
            self.0.store(0, Ordering::Release);
        }
    }
}

impl Service {
    /// A service of this extender with an empty page.
    pub fn new(app: Arc<App>, set_log_level: Arc<SetLogLevel>) -> Self {
        let live = Arc::new(Live::new(&app.clock));
        Self { app, live, set_log_level, early: Arc::default() }
    }
}

/// Permits for slow queries; further ones wait. Callers are anonymous, and each query may take
/// megabytes and walk over all nodes.
pub(crate) static LOOKS: Semaphore = Semaphore::const_new(4);

/// How long a query waits for its permit.
pub(crate) const PERMIT_WITHIN: Duration = Duration::from_secs(8);

/// A permit, or the refusal if too many wait for one.
pub(crate) async fn permit_of(
    permits: &'static Semaphore,
) -> Result<SemaphorePermit<'static>, Response> {
    match tokio::time::timeout(PERMIT_WITHIN, permits.acquire()).await {
        Ok(permit) => {
            permit.map_err(|_| refusal(StatusCode::INTERNAL_SERVER_ERROR, "a fault in gpupack"))
        }
        Err(_) => {
            let error = "too many queries at once: try again later";
            Err(refusal(StatusCode::SERVICE_UNAVAILABLE, error))
        }
    }
}

/// Runs a slow query off the threads that answer calls.
pub(crate) async fn look<T: Send + 'static>(
    app: &Arc<App>,
    look: impl FnOnce(&App) -> T + Send + 'static,
) -> Result<T, Response> {
    look_with_permit(&LOOKS, app, look).await
}

pub(crate) async fn look_with_permit<T: Send + 'static>(
    permits: &'static Semaphore,
    app: &Arc<App>,
    look: impl FnOnce(&App) -> T + Send + 'static,
) -> Result<T, Response> {
    let app = Arc::clone(app);
    let permit = permit_of(permits).await?;
    work_with(permit, move || look(&app)).await
}

pub(crate) fn too_long(parameter: &str, most: usize) -> Response {
    let error = format!("`{parameter}` is longer than the {most} bytes that Kubernetes allows");
    refusal(StatusCode::BAD_REQUEST, &error)
}
