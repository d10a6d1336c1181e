//! A future that is polled again at once if it wakes its own task.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures::task::AtomicWaker;

/// How often a future is polled again in one poll before other tasks run.
pub(crate) const MOST_POLLS: usize = 8;

/// Polls until nothing is left to do. A future that wakes its own task, as happens with each body,
/// is polled again at once. tokio would take that for work to share and would wake another thread.
pub(crate) async fn awake<T>(mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>) -> T {
    let bell = Arc::<Bell>::default();
    let waker = Waker::from(Arc::clone(&bell));
    poll_fn(|context| {
        bell.task.register(context.waker());
        bell.has_rung.store(false, Ordering::SeqCst);
        for _ in 0..MOST_POLLS {
            bell.is_heard.store(true, Ordering::SeqCst);
            let polled = poll(&mut Context::from_waker(&waker));
            bell.is_heard.store(false, Ordering::SeqCst);
            if polled.is_ready() || !bell.has_rung.swap(false, Ordering::SeqCst) {
                return polled;
            }
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await
}

/// Wakes a task, unless the task is being polled and will check `has_rung` afterwards.
#[derive(Default)]
struct Bell {
    task: AtomicWaker,
    is_heard: AtomicBool,
    has_rung: AtomicBool,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.has_rung.store(true, Ordering::SeqCst);
        if !self.is_heard.load(Ordering::SeqCst) {
            self.task.wake();
        }
    }
}
