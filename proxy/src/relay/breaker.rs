//! Breaking a relay off from outside.

use std::cell::RefCell;
use std::task::{Context, Poll, Waker};

/// On what grounds a relay is broken off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Grounds {
    /// A policy forbids the connection.
    Policy,
    /// What proved an end's identity proves it no more.
    Identity,
}

/// Breaks a relay off from outside its task. A relay that nobody cuts pays one look for each time it is polled.
#[derive(Debug, Default)]
pub struct Breaker(RefCell<State>);

#[derive(Debug, Default)]
enum State {
    #[default]
    Unwatched,
    Watched(Waker),
    Cut(Grounds, Box<str>),
}

impl Breaker {
    /// Breaks the relay off, now or as soon as it begins. Of several reasons the first counts.
    pub fn cut(&self, grounds: Grounds, reason: &str) {
        let before = match &mut *self.0.borrow_mut() {
            State::Cut(..) => return,
            state => std::mem::replace(state, State::Cut(grounds, reason.into())),
        };
        if let State::Watched(task) = before {
            task.wake();
        }
    }

    /// Ready with the reason once it is cut.
    pub(super) fn poll_cut(&self, cx: &Context<'_>) -> Poll<(Grounds, String)> {
        match &mut *self.0.borrow_mut() {
            State::Cut(grounds, reason) => Poll::Ready((*grounds, reason.to_string())),
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
            State::Cut(_, reason) => Some(reason.to_string()),
            State::Unwatched | State::Watched(_) => None,
        }
    }
}
