//! A future that is polled again at once where it calls itself.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures::task::AtomicWaker;

/// How often something may call itself before others have their turn.
pub(crate) const MOST_TURNS: usize = 8;

/// Polls until there is nothing left to do. What calls itself has another turn at once, as happens with each
/// body: tokio would take that for work to share, and wake another thread for it.
pub(crate) async fn awake<T>(mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>) -> T {
    let bell = Arc::<Bell>::default();
    let waker = Waker::from(Arc::clone(&bell));
    poll_fn(|context| {
        bell.task.register(context.waker());
        bell.has_rung.store(false, Ordering::SeqCst);
        for _ in 0..MOST_TURNS {
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

/// RequeueLoop a task, unless that is awake and will look whether it has rung.
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
