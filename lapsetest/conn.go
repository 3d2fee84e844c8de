package lapsetest

import (
	"net"
	"sync"
	"sync/atomic"
)

// gate holds up who passes it: open when ch is nil, otherwise shut until the channel
// is closed.
type gate struct{ ch atomic.Pointer[chan struct{}] }

func (g *gate) shut() {
	ch := make(chan struct{})
	g.ch.CompareAndSwap(nil, &ch)
}

func (g *gate) open() {
	if ch := g.ch.Swap(nil); ch != nil {
		close(*ch)
	}
}

// pass returns true once the gate is open, false if stop comes first.
func (g *gate) pass(stop <-chan struct{}) bool {
	for {
		ch := g.ch.Load()
		if ch == nil {
			return true
		}
		select {
		case <-*ch:
		case <-stop:
			return false
		}
	}
}

// listener hands out connections that the Broker can silence and count.
type listener struct {
	net.Listener
	b *Broker
}

func (l *listener) Accept() (net.Conn, error) {
	inner, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: inner, b: l.b, closed: make(chan struct{})}
	l.b.addConn(c)
	return c, nil
}

// conn withholds its bytes in both directions while its own gate or the Broker's is
// shut. The kernel goes on accepting what the peer sends, as it does for a stopped
// process. That the peer has gone is let through, so that nothing waits for ever.
type conn struct {
	net.Conn
	b      *Broker
	own    gate
	once   sync.Once
	closed chan struct{} // closed by Close
}

func (c *conn) pass() bool { return c.b.gate.pass(c.closed) && c.own.pass(c.closed) }

func (c *conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if err == nil && !c.pass() {
		return 0, net.ErrClosed
	}
	return n, err
}

func (c *conn) Write(p []byte) (int, error) {
	if !c.pass() {
		return 0, net.ErrClosed
	}
	return c.Conn.Write(p)
}

func (c *conn) Close() error {
	c.once.Do(func() {
		close(c.closed)
		c.b.dropConn(c)
	})
	return c.Conn.Close()
}

func (b *Broker) addConn(c *conn) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.conns[c] = struct{}{}
	b.noteChange()
}

func (b *Broker) dropConn(c *conn) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.conns, c)
	b.noteChange()
}
