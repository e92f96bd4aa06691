//! Breaking a relay off from outside.

use std::cell::RefCell;
use std::task::{Context, Poll, Waker};

/// Breaks a relay off from outside its task. A relay that nobody cuts pays one look for each time it is polled.
#[derive(Debug, Default)]
pub struct Breaker(RefCell<State>);

#[derive(Debug, Default)]
enum State {
    #[default]
    Unwatched,
    Watched(Waker),
    Cut(String),
}

impl Breaker {
    /// Breaks the relay off, now or as soon as it begins. Of several reasons the first counts.
    pub fn cut(&self, reason: String) {
        let before = match &mut *self.0.borrow_mut() {
            State::Cut(_) => return,
            state => std::mem::replace(state, State::Cut(reason)),
        };
        if let State::Watched(task) = before {
            task.wake();
        }
    }

    /// Ready with the reason once it is cut.
    pub(super) fn poll_cut(&self, cx: &Context<'_>) -> Poll<String> {
        match &mut *self.0.borrow_mut() {
            State::Cut(reason) => Poll::Ready(reason.clone()),
            State::Watched(task) if task.will_wake(cx.waker()) => Poll::Pending,
            state => {
                *state = State::Watched(cx.waker().clone());
                Poll::Pending
            }
        }
    }

    /// Why it was cut, if it was.
    #[cfg(test)]
    pub(crate) fn reason(&self) -> Option<String> {
        match &*self.0.borrow() {
            State::Cut(reason) => Some(reason.clone()),
            State::Unwatched | State::Watched(_) => None,
        }
    }
}
