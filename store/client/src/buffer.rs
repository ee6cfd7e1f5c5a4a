//! Callers' memory, without its type: links receive into it and hand it back.

use crate::memory::Buffer;
use std::any::Any;

/// Memory of a caller that a page is received into.
pub(crate) trait PageBuffer: Send + 'static {
    fn bytes(&mut self) -> &mut [u8];
    /// The buffer, if it is one of this client's.
    fn own(&mut self) -> Option<&mut Buffer>;
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
}

impl<B: AsMut<[u8]> + Send + 'static> PageBuffer for B {
    fn bytes(&mut self) -> &mut [u8] {
        self.as_mut()
    }

    fn own(&mut self) -> Option<&mut Buffer> {
        (self as &mut dyn Any).downcast_mut()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

pub(crate) type DynBuffer = Box<dyn PageBuffer>;

/// The buffer as the caller gave it.
pub(crate) fn downcast<B: 'static>(buffer: DynBuffer) -> B {
    *buffer.into_any().downcast().expect("a request's buffers all have the type the caller gave")
}
