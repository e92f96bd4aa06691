//! Where identities wait for their call to the CA.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::queue::{Ended, Priority, Queue, Ticket};

/// Uniform in 0..1.
pub(super) type Random = Arc<dyn Fn() -> f64 + Send + Sync>;

/// The queue before the CA, on a clock.
pub(super) struct Gate {
    inner: Arc<Inner>,
    driver: AbortHandle,
}

struct Inner {
    state: Mutex<State>,
    random: Random,
    /// When to look again may have changed.
    changed: Notify,
}

struct State {
    queue: Queue,
    waiting: HashMap<Ticket, oneshot::Sender<()>>,
}

/// A place at the gate, and then the right to one call. Dropping it gives either up.
pub(super) struct Turn<'a> {
    inner: &'a Inner,
    ticket: Ticket,
    ended: Ended,
}

impl Gate {
    pub(super) fn new(limit: usize, random: Random, runtime: &Handle) -> Self {
        let inner = Arc::new(Inner {
            state: Mutex::new(State {
                queue: Queue::new(limit),
                waiting: HashMap::new(),
            }),
            random,
            changed: Notify::new(),
        });
        let driver = runtime.spawn(drive(inner.clone())).abort_handle();
        Self { inner, driver }
    }

    /// Waits for the right to a call. `tried` is when the last one found the CA away, if that was the last.
    /// `demand` ends when a connection begins to wait; a right that is due is not given away for it.
    pub(super) async fn turn(
        &self,
        priority: Priority,
        tried: Option<Instant>,
        demand: impl Future<Output = ()>,
    ) -> Turn<'_> {
        let (told, mut granted) = oneshot::channel();
        let ticket = {
            let mut state = self.inner.lock();
            let ticket = state.queue.push(priority, tried);
            state.waiting.insert(ticket, told);
            ticket
        };
        let turn = Turn {
            inner: &self.inner,
            ticket,
            ended: Ended::Abandoned,
        };
        self.inner.grant();
        tokio::select! {
            biased;
            _ = &mut granted => return turn,
            () = demand => {}
        }
        self.inner.lock().queue.raise(ticket);
        self.inner.grant();
        // The sender lives as long as the ticket is in the queue, which the turn keeps it in.
        let _ = granted.await;
        turn
    }

    /// Since when the CA is away, if it is.
    pub(super) fn away_since(&self) -> Option<Instant> {
        self.inner.lock().queue.away_since()
    }

    /// Calls in flight.
    pub(super) fn in_flight(&self) -> usize {
        self.inner.lock().queue.in_flight()
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Turn<'_> {
    /// Says how the call ended.
    pub(super) fn end(mut self, ended: Ended) {
        self.ended = ended;
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut random = || (self.inner.random)().clamp(0.0, 1.0);
        let mut state = self.inner.lock();
        let before = state.queue.away_since();
        let now = Instant::now();
        state.queue.leave(self.ticket, self.ended, now, &mut random);
        state.waiting.remove(&self.ticket);
        let after = state.queue.away_since();
        drop(state);
        match (before, after) {
            (None, Some(_)) => tracing::warn!("the CA is away: it is tried now and then until it answers"),
            (Some(since), None) => {
                tracing::info!(away_s = (now - since).as_secs_f32(), "the CA answers again");
            }
            _ => {}
        }
        self.inner.grant();
    }
}

impl Inner {
    /// Lets call who may.
    fn grant(&self) {
        self.grant_until();
        self.changed.notify_one();
    }

    /// Lets call who may, and says when somebody else may if nothing happens before.
    fn grant_until(&self) -> Option<Instant> {
        let mut state = self.lock();
        let now = Instant::now();
        while let Some(ticket) = state.queue.next(now) {
            // Who has left has left the queue first.
            if let Some(told) = state.waiting.remove(&ticket) {
                let _ = told.send(());
            }
        }
        state.queue.wake_after(now)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // What is guarded stays whole even if a holder panicked.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Lets call who may when time has come.
async fn drive(inner: Arc<Inner>) {
    loop {
        let wake = inner.grant_until();
        let time = async {
            match wake {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = inner.changed.notified() => {}
            () = time => {}
        }
    }
}
