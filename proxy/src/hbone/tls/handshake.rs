//! The handshake, driven by rustls, and what it leaves behind: keys, and what changes them.

use std::io;
use std::ops::Deref;

use bytes::{Buf as _, BytesMut};
use rustls::client::{ClientConnectionData, UnbufferedClientConnection};
use rustls::kernel::KernelConnection;
use rustls::server::{ServerConnectionData, UnbufferedServerConnection};
use rustls::unbuffered::{ConnectionState, EncodeError, UnbufferedConnectionCommon, UnbufferedStatus};
use rustls::{ConnectionTrafficSecrets, Error, ExtractedSecrets};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use super::record::{Keys, record_len};
use super::stream::TlsStream;
use super::{PeerCertificates, fault};
use crate::node::read_available;

/// What one read takes at most during a handshake, which is some few KiB each way.
const READ: usize = 8 << 10;
/// The most that may come in one flight: a chain at its largest, in records.
const MAX_FLIGHT: usize = 128 << 10;

/// What derives new keys once a connection stands, by its role.
pub(super) enum Secrets {
    Client(KernelConnection<ClientConnectionData>),
    Server(KernelConnection<ServerConnectionData>),
}

impl Secrets {
    /// The next keys to send with.
    pub(super) fn next_to_send(&mut self) -> Result<Keys, Error> {
        Keys::new(match self {
            Self::Client(kept) => kept.update_tx_secret()?,
            Self::Server(kept) => kept.update_tx_secret()?,
        })
    }

    /// The next keys to receive with.
    pub(super) fn next_to_receive(&mut self) -> Result<Keys, Error> {
        Keys::new(match self {
            Self::Client(kept) => kept.update_rx_secret()?,
            Self::Server(kept) => kept.update_rx_secret()?,
        })
    }

    /// Whether the peer may send session tickets, which are not used.
    pub(super) fn takes_tickets(&self) -> bool {
        matches!(self, Self::Client(_))
    }
}

/// One role's side of a handshake.
pub(super) trait Handshake: Deref<Target = UnbufferedConnectionCommon<Self::Data>> + Sized {
    type Data;

    fn process<'c, 'i>(&'c mut self, incoming: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Data>;
    fn finish(self) -> Result<(ExtractedSecrets, Secrets), Error>;
}

impl Handshake for UnbufferedClientConnection {
    type Data = ClientConnectionData;

    fn process<'c, 'i>(&'c mut self, incoming: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Data> {
        self.process_tls_records(incoming)
    }

    fn finish(self) -> Result<(ExtractedSecrets, Secrets), Error> {
        let (secrets, kept) = self.dangerous_into_kernel_connection()?;
        Ok((secrets, Secrets::Client(kept)))
    }
}

impl Handshake for UnbufferedServerConnection {
    type Data = ServerConnectionData;

    fn process<'c, 'i>(&'c mut self, incoming: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Data> {
        self.process_tls_records(incoming)
    }

    fn finish(self) -> Result<(ExtractedSecrets, Secrets), Error> {
        let (secrets, kept) = self.dangerous_into_kernel_connection()?;
        Ok((secrets, Secrets::Server(kept)))
    }
}

/// What comes next.
enum Next {
    /// Records have been encoded, or sent: there is more to process.
    Process,
    /// What has been encoded is to be sent.
    Send,
    /// The peer has to say more.
    Read,
    Done,
}

/// Shakes hands to the end.
pub(super) async fn complete(
    mut tcp: TcpStream,
    mut connection: impl Handshake,
) -> io::Result<(TlsStream, PeerCertificates)> {
    let (mut incoming, mut outgoing) = (BytesMut::new(), Vec::new());
    // What rustls is shown: whole records, and none before it has asked for it, so that it never comes to one that is of
    // the connection that the handshake is for.
    let mut shown = 0;
    loop {
        match step(&mut connection, &mut incoming, &mut shown, &mut outgoing) {
            Ok(Next::Process) => {}
            Ok(Next::Send) => {
                tcp.write_all(&outgoing).await?;
                outgoing.clear();
            }
            Ok(Next::Read) => shown += next_record(&tcp, &mut incoming, shown).await?,
            Ok(Next::Done) => break,
            Err(error) => {
                // What is wrong is told the peer, as far as TLS has a word for it. rustls wants to see what it has not
                // come to, too.
                while let Ok(Next::Process) = step(&mut connection, &mut incoming, &mut shown, &mut outgoing) {}
                let _ = tcp.write_all(&outgoing).await;
                return Err(fault(error));
            }
        }
    }
    let peer = connection.peer_certificates().unwrap_or_default().to_vec();
    let (ExtractedSecrets { tx, rx }, kept) = connection.finish().map_err(fault)?;
    let keys = |secrets: (u64, ConnectionTrafficSecrets)| Keys::new(secrets).map_err(fault);
    Ok((TlsStream::new(tcp, kept, keys(tx)?, keys(rx)?, incoming), peer))
}

/// Lets rustls go on with the first `shown` bytes of what has come, less those that it is done with, and takes what it has
/// to say. What comes next.
fn step(
    connection: &mut impl Handshake,
    incoming: &mut BytesMut,
    shown: &mut usize,
    outgoing: &mut Vec<u8>,
) -> Result<Next, Error> {
    let UnbufferedStatus { discard, state } = connection.process(&mut incoming[..*shown]);
    let next = state.and_then(|state| match state {
        ConnectionState::EncodeTlsData(mut state) => {
            let begin = outgoing.len();
            if let Err(EncodeError::InsufficientSize(more)) = state.encode(&mut []) {
                outgoing.resize(begin + more.required_size, 0);
            }
            let written = state
                .encode(&mut outgoing[begin..])
                .map_err(|error| Error::General(error.to_string()))?;
            outgoing.truncate(begin + written);
            Ok(Next::Process)
        }
        ConnectionState::TransmitTlsData(state) => {
            state.done();
            Ok(Next::Send)
        }
        ConnectionState::BlockedHandshake => Ok(Next::Read),
        ConnectionState::WriteTraffic(_) => Ok(Next::Done),
        // Neither comes of records of a handshake.
        _ => Err(Error::HandshakeNotComplete),
    });
    incoming.advance(discard);
    *shown -= discard;
    next
}

/// Waits until a record more has come than those of the first `shown` bytes, and gives its length.
async fn next_record(tcp: &TcpStream, incoming: &mut BytesMut, shown: usize) -> io::Result<usize> {
    loop {
        let rest = &incoming[shown..];
        if let Some(len) = record_len(rest).map_err(fault)?
            && len <= rest.len()
        {
            return Ok(len);
        }
        if incoming.len() > MAX_FLIGHT {
            return Err(fault(Error::PeerSentOversizedRecord));
        }
        tcp.readable().await?;
        incoming.reserve(READ);
        match read_available(tcp, incoming) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}
