//! The byte stream over records.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, BufMut as _, BytesMut};
use rustls::{AlertDescription, ContentType, Error, HandshakeType, InvalidMessage, PeerMisbehaved};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::fault;
use super::handshake::Secrets;
use super::record::{
    ALERT, APPLICATION_DATA, CHANGE_CIPHER_SPEC, HANDSHAKE, Keys, MAX_PLAINTEXT, OVERHEAD, alert_for, opened_len,
    record_len,
};
use crate::node::read_available;

/// What one read from the socket takes at most.
const READ_AHEAD: usize = 512 << 10;
/// From here on what is sealed has to be sent before more is.
const WRITE_BUFFER: usize = 256 << 10;
/// How many records one key seals (RFC 8446, section 5.5: for AES-GCM some 2^24.5 of full size).
const RECORDS_PER_KEY: u64 = 1 << 24;
/// The most of a message that is held until the rest of it has come. Only session tickets are long.
const MAX_MESSAGE: usize = 64 << 10;

/// A `KeyUpdate` that asks for none in return (section 4.6.3).
const KEY_UPDATE: [u8; 5] = [24, 0, 0, 1, 0];
/// The level of an alert that ends the connection, and of one that does not.
const FATAL: u8 = 2;
const WARNING: u8 = 1;

/// A connection whose handshake is complete. While nothing moves it holds no buffer.
pub(in crate::hbone) struct TlsStream {
    tcp: TcpStream,
    secrets: Secrets,
    receive: Keys,
    send: Keys,
    /// What has come and is not opened yet.
    sealed: BytesMut,
    /// What is opened of a record for which the reader has had no room.
    opened: BytesMut,
    /// The beginning of a message that goes on in the next record.
    message: Vec<u8>,
    /// What is sealed and not sent yet.
    outgoing: BytesMut,
    records_per_key: u64,
    /// The peer has asked for new keys, and not got them yet.
    owes_keys: bool,
    /// The peer has said that it sends no more.
    ended: bool,
    /// Why nothing more can be read.
    broken: Option<Error>,
    said_goodbye: bool,
}

impl TlsStream {
    /// `sealed` is what has come behind the handshake.
    pub(super) fn new(tcp: TcpStream, secrets: Secrets, send: Keys, receive: Keys, sealed: BytesMut) -> Self {
        Self {
            tcp,
            secrets,
            receive,
            send,
            sealed,
            opened: BytesMut::new(),
            message: Vec::new(),
            outgoing: BytesMut::new(),
            records_per_key: RECORDS_PER_KEY,
            owes_keys: false,
            ended: false,
            broken: None,
            said_goodbye: false,
        }
    }

    /// Opens what has come, as far as there is room for it and there are whole records.
    fn open_available(&mut self, into: &mut ReadBuf<'_>) -> Result<(), Error> {
        while !self.ended && into.remaining() > 0 {
            let Some(len) = record_len(&self.sealed)?.filter(|len| *len <= self.sealed.len()) else {
                break;
            };
            if self.sealed[0] == CHANGE_CIPHER_SPEC {
                return Err(unexpected(ContentType::ChangeCipherSpec));
            }
            let Some(room) = opened_len(len) else {
                return Err(Error::DecryptError);
            };
            // Straight to where it is wanted, if there is room for all of it.
            let fits = into.remaining() >= room;
            let mut apart = BytesMut::zeroed(if fits { 0 } else { room });
            let to = if fits {
                into.initialize_unfilled_to(room)
            } else {
                &mut apart
            };
            let (kind, length) = self.receive.open(&self.sealed[..len], to)?;
            if kind != HANDSHAKE && !self.message.is_empty() {
                // Nothing may come between the parts of a message (section 5.1).
                return Err(Error::PeerMisbehaved(
                    PeerMisbehaved::MessageInterleavedWithHandshakeMessage,
                ));
            }
            match kind {
                APPLICATION_DATA if fits => into.advance(length),
                APPLICATION_DATA => {
                    apart.truncate(length);
                    self.opened = apart;
                    self.hand_out(into);
                }
                _ => {
                    let content = to[..length].to_vec();
                    self.control(kind, &content)?;
                }
            }
            self.sealed.advance(len);
        }
        if self.sealed.is_empty() {
            self.sealed = BytesMut::new();
        }
        Ok(())
    }

    fn hand_out(&mut self, into: &mut ReadBuf<'_>) {
        let len = self.opened.len().min(into.remaining());
        into.put_slice(&self.opened[..len]);
        self.opened.advance(len);
        if self.opened.is_empty() {
            self.opened = BytesMut::new();
        }
    }

    /// What is not the application's.
    fn control(&mut self, kind: u8, content: &[u8]) -> Result<(), Error> {
        match (kind, content) {
            (ALERT, &[_, description]) => match AlertDescription::from(description) {
                AlertDescription::CloseNotify => self.ended = true,
                AlertDescription::UserCanceled => {}
                alert => return Err(Error::AlertReceived(alert)),
            },
            (ALERT, _) => return Err(Error::InvalidMessage(InvalidMessage::TrailingData("Alert"))),
            (HANDSHAKE, []) => return Err(Error::InvalidMessage(InvalidMessage::InvalidEmptyPayload)),
            (HANDSHAKE, content) => {
                self.message.extend_from_slice(content);
                self.messages()?;
            }
            (kind, _) => return Err(unexpected(ContentType::from(kind))),
        }
        Ok(())
    }

    /// Takes account of the handshake's messages that are whole.
    fn messages(&mut self) -> Result<(), Error> {
        while let Some((&[kind, a, b, c], rest)) = self.message.split_first_chunk() {
            let len = u32::from_be_bytes([0, a, b, c]) as usize;
            if len > MAX_MESSAGE {
                return Err(Error::InvalidMessage(InvalidMessage::HandshakePayloadTooLarge));
            }
            if rest.len() < len {
                return Ok(());
            }
            match (HandshakeType::from(kind), &rest[..len]) {
                (HandshakeType::NewSessionTicket, _) if self.secrets.takes_tickets() => {}
                (HandshakeType::KeyUpdate, &[asks @ (0 | 1)]) => {
                    // Nothing may stand behind it that is sealed with the keys before.
                    if rest.len() > len {
                        return Err(Error::PeerMisbehaved(PeerMisbehaved::KeyEpochWithPendingFragment));
                    }
                    self.receive = self.secrets.next_to_receive()?;
                    self.owes_keys |= asks == 1;
                }
                (HandshakeType::KeyUpdate, _) => {
                    return Err(Error::InvalidMessage(InvalidMessage::InvalidKeyUpdate));
                }
                _ => return Err(unexpected(ContentType::Handshake)),
            }
            self.message.drain(..4 + len);
        }
        Ok(())
    }

    /// Seals as much of `from` as there is room for, and gives how much that was.
    fn seal(&mut self, from: &[IoSlice<'_>]) -> Result<usize, Error> {
        let all = from.iter().map(|slice| slice.len()).sum::<usize>();
        let mut from = from.iter().map(|slice| &**slice);
        let (mut slice, mut sealed): (&[u8], usize) = (&[], 0);
        while sealed < all && self.outgoing.len() < WRITE_BUFFER {
            if self.owes_keys || self.send.records() >= self.records_per_key {
                self.change_keys()?;
            }
            let length = (all - sealed).min(MAX_PLAINTEXT);
            // All at once, not a record at a time.
            let room = (all - sealed).min(WRITE_BUFFER);
            self.outgoing.reserve(room + OVERHEAD * (1 + room / MAX_PLAINTEXT));
            let content = |out: &mut BytesMut| {
                let mut left = length;
                while left > 0 {
                    if slice.is_empty() {
                        slice = from.next().unwrap_or_default();
                    }
                    let (now, later) = slice.split_at(left.min(slice.len()));
                    out.put_slice(now);
                    (slice, left) = (later, left - now.len());
                }
            };
            self.send.seal(APPLICATION_DATA, length, content, &mut self.outgoing)?;
            sealed += length;
        }
        Ok(sealed)
    }

    fn say(&mut self, kind: u8, content: &[u8]) -> Result<(), Error> {
        let append = |out: &mut BytesMut| out.put_slice(content);
        self.send.seal(kind, content.len(), append, &mut self.outgoing)
    }

    fn change_keys(&mut self) -> Result<(), Error> {
        self.say(HANDSHAKE, &KEY_UPDATE)?;
        self.send = self.secrets.next_to_send()?;
        self.owes_keys = false;
        Ok(())
    }

    /// Sends all that is sealed.
    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.outgoing.is_empty() {
            let sent = ready!(Pin::new(&mut self.tcp).poll_write(cx, &self.outgoing))?;
            if sent == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.outgoing.advance(sent);
        }
        self.outgoing = BytesMut::new();
        Poll::Ready(Ok(()))
    }

    /// Gives the peer the new keys that it has asked for, unless so much waits to be sent that it has to wait, too.
    fn poll_owed(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        if self.owes_keys && self.outgoing.len() < WRITE_BUFFER {
            self.change_keys().map_err(fault)?;
            if let Poll::Ready(sent) = self.poll_send(cx) {
                sent?;
            }
        }
        Ok(())
    }

    /// Tells the peer, as far as that can be done without waiting, and remembers.
    fn break_off(&mut self, cx: &mut Context<'_>, error: Error) -> io::Error {
        if !matches!(error, Error::AlertReceived(_)) {
            let alert = [FATAL, alert_for(&error).into()];
            if self.say(ALERT, &alert).is_ok() {
                let _ = self.poll_send(cx);
            }
        }
        self.broken = Some(error.clone());
        fault(error)
    }
}

fn unexpected(got_type: ContentType) -> Error {
    Error::InappropriateMessage {
        expect_types: vec![ContentType::ApplicationData],
        got_type,
    }
}

impl AsyncRead for TlsStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = into.filled().len();
        if let Some(error) = &this.broken {
            return Poll::Ready(Err(fault(error.clone())));
        }
        this.hand_out(into);
        loop {
            let opened = this.open_available(into);
            let has_read = into.filled().len() > before;
            match opened {
                Ok(()) => this.poll_owed(cx)?,
                // What came before stands.
                Err(error) if has_read => drop(this.break_off(cx, error)),
                Err(error) => return Poll::Ready(Err(this.break_off(cx, error))),
            }
            if has_read || this.ended || into.remaining() == 0 {
                return Poll::Ready(Ok(()));
            }
            // Memory is taken only once there is something to read.
            ready!(this.tcp.poll_read_ready(cx))?;
            this.sealed.reserve(READ_AHEAD.saturating_sub(this.sealed.len()));
            match read_available(&this.tcp, &mut this.sealed) {
                // Whoever cuts the connection must not seem to have ended it.
                Ok(0) => return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into())),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for TlsStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(from)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        // All of it: what is sealed behind a rest would have to be moved with it as the buffer grows.
        ready!(this.poll_send(cx))?;
        let sealed = this.seal(from).map_err(fault)?;
        if let Poll::Ready(sent) = this.poll_send(cx) {
            sent?;
        }
        Poll::Ready(Ok(sealed))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().poll_send(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if !this.said_goodbye {
            this.said_goodbye = true;
            this.say(ALERT, &[WARNING, AlertDescription::CloseNotify.into()])
                .map_err(fault)?;
        }
        ready!(this.poll_send(cx))?;
        Pin::new(&mut this.tcp).poll_shutdown(cx)
    }
}

#[cfg(test)]
impl TlsStream {
    pub(super) fn change_keys_after(&mut self, records: u64) {
        self.records_per_key = records;
    }

    /// The socket, the keys to send with, and what makes the next.
    pub(super) fn into_parts(self) -> (TcpStream, Keys, Secrets) {
        (self.tcp, self.send, self.secrets)
    }

    /// How many bytes its buffers have taken.
    pub(super) fn held(&self) -> usize {
        self.sealed.capacity() + self.opened.capacity() + self.message.capacity() + self.outgoing.capacity()
    }
}
