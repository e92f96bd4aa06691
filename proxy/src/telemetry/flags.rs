//! Why a connection failed, in the few words that Istio's metrics know.

use crate::dataplane::record::{End, How, Party, Phase};

/// The `response_flags` label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ResponseFlag {
    /// Nothing went wrong on this proxy's part.
    None,
    /// Refused by policy.
    Deny,
    /// The next hop refused, or was not reached in time.
    Connect,
    /// TLS with the tunnel's peer failed.
    TlsFailure,
    /// TLS stood, but the tunnel's HTTP/2 or its CONNECT request failed.
    H2HandshakeFailure,
    /// The certificate needed was not to be had.
    IdentityError,
    /// This proxy was told to stop.
    Drain,
    /// Anything else.
    Error,
}

impl ResponseFlag {
    /// Every flag, in the order of its discriminants.
    pub(super) const ALL: [Self; 8] = [
        Self::None,
        Self::Deny,
        Self::Connect,
        Self::TlsFailure,
        Self::H2HandshakeFailure,
        Self::IdentityError,
        Self::Drain,
        Self::Error,
    ];

    /// The flag of a connection that ended so.
    pub fn of(end: &End) -> Self {
        match (&end.how, end.phase, end.by) {
            (How::Policy(_), ..) => Self::Deny,
            (How::Drain, ..) => Self::Drain,
            // Once bytes flow, the parties may end it as they please; so may a client that is tired of waiting.
            (How::Fin | How::Reset, Phase::Relay, _) | (How::Fin | How::Reset, _, Party::Source) => Self::None,
            (_, Phase::Handshake, _) => Self::TlsFailure,
            (How::Identity(_), ..) | (_, Phase::Identity, _) => Self::IdentityError,
            (How::Refused(_), Phase::Request, _) | (_, Phase::Connect, _) => Self::Connect,
            (_, Phase::Request, _) => Self::H2HandshakeFailure,
            (How::Refused(_), ..) => Self::Connect,
            _ => Self::Error,
        }
    }

    /// The label's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "-",
            Self::Deny => "DENY",
            Self::Connect => "CONNECT",
            Self::TlsFailure => "TLS_FAILURE",
            Self::H2HandshakeFailure => "H2_HANDSHAKE_FAILURE",
            Self::IdentityError => "IDENTITY_ERROR",
            Self::Drain => "DRAIN",
            Self::Error => "ERROR",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::tests::end;

    #[test]
    fn each_end_has_its_flag() {
        use {Party as By, Phase as At, ResponseFlag as Flag};
        let text = String::new;
        for (by, phase, how, flag) in [
            (By::Source, At::Relay, How::Fin, Flag::None),
            (By::Destination, At::Relay, How::Reset, Flag::None),
            (By::Source, At::Connect, How::Reset, Flag::None),
            (By::Proxy, At::Decide, How::Policy(text()), Flag::Deny),
            (By::Proxy, At::Relay, How::Policy(text()), Flag::Deny),
            (By::Proxy, At::Identity, How::Timeout, Flag::IdentityError),
            (By::Proxy, At::Identity, How::Identity(text()), Flag::IdentityError),
            (By::Proxy, At::Connect, How::Timeout, Flag::Connect),
            (By::Destination, At::Connect, How::Refused(text()), Flag::Connect),
            (By::Destination, At::Connect, How::Reset, Flag::Connect),
            (By::Destination, At::Handshake, How::Identity(text()), Flag::TlsFailure),
            (By::Destination, At::Handshake, How::Reset, Flag::TlsFailure),
            (By::Proxy, At::Handshake, How::Timeout, Flag::TlsFailure),
            (By::Destination, At::Request, How::Refused(text()), Flag::Connect),
            (By::Destination, At::Request, How::Reset, Flag::H2HandshakeFailure),
            (By::Proxy, At::Request, How::Timeout, Flag::H2HandshakeFailure),
            (By::Proxy, At::Decide, How::Refused(text()), Flag::Connect),
            (By::Proxy, At::Accept, How::Error(text()), Flag::Error),
            (By::Proxy, At::Relay, How::Drain, Flag::Drain),
            (By::Proxy, At::Relay, How::Timeout, Flag::Error),
        ] {
            assert_eq!(
                ResponseFlag::of(&end(by, phase, how.clone())),
                flag,
                "{by:?} {phase:?} {how:?}"
            );
        }
    }

    #[test]
    fn a_flags_place_is_its_discriminant() {
        for (place, flag) in ResponseFlag::ALL.into_iter().enumerate() {
            assert_eq!(flag as usize, place);
        }
    }
}
