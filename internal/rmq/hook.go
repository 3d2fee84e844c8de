package rmq

import (
	"context"
	"os"
	"sync"

	golang "github.com/apache/rocketmq-clients/golang/v5"
	innermd "github.com/apache/rocketmq-clients/golang/v5/metadata"
	"github.com/apache/rocketmq-clients/golang/v5/pkg/utils"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
)

// The official client is configured through globals only: a constructor of its
// connections that it calls without options (client_manager.go:215), and a logger
// whose file is fixed by environment variables (log.go:32-119). Both are set here,
// in init, because that is the one moment at which nobody else can be using them;
// neither is synchronised.
//
// The constructor is told a target and nothing else, so it cannot know whose
// connection it makes. It makes a front: a connection that never dials, whose
// interceptors read the client id from the headers of each call and hand the call
// to the link of that client. Clients that are not ours, in a program that uses
// the official client beside this package, get the official connection.

func init() {
	silenceClientLog()
	// The client keeps the host's name in a global that the first of its clients fills; two at once would race for it (utils.go:177).
	utils.HostName()
	newRPCClient := golang.NewRpcClient
	golang.NewRpcClient = func(target string, opts ...golang.RpcClientOption) (golang.RpcClient, error) {
		return newRPCClient(target, append(opts, golang.WithRpcClientClientConnFunc(newFront))...)
	}
}

// silenceClientLog turns the client's log off. It cannot be replaced: its only
// outputs are a file that is rotated, with missing directories created, and
// os.Stdout as it is when the logger is made. So the logger is made while
// os.Stdout is the null device. Nothing is lost by it: the link logs every
// refused call with its code, and at debug level the client would log bodies.
func silenceClientLog() {
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		return // no null device: the client's file it is
	}
	// At error level the client spares itself most of the formatting.
	settings := map[string]string{golang.ENABLE_CONSOLE_APPENDER: "true", golang.CLIENT_LOG_LEVEL: "error"}
	before := make(map[string]string)
	for key, value := range settings {
		if old, ok := os.LookupEnv(key); ok {
			before[key] = old
		}
		_ = os.Setenv(key, value)
	}
	stdout := os.Stdout
	os.Stdout = null
	golang.ResetLogger()
	os.Stdout = stdout
	for key := range settings {
		_ = os.Unsetenv(key)
		if old, ok := before[key]; ok {
			_ = os.Setenv(key, old)
		}
	}
}

// links finds the link of a client by its id, as the headers of its calls carry it.
var links = struct {
	sync.RWMutex
	byClientID map[string]*link
}{byClientID: make(map[string]*link)}

func registerLink(clientID string, l *link) {
	links.Lock()
	defer links.Unlock()
	links.byClientID[clientID] = l
}

// unregisterLink leaves a mark, so that a late call of a stopped client fails
// instead of being taken for that of a client which is not ours.
func unregisterLink(clientID string) {
	registerLink(clientID, closedLink)
}

var closedLink = func() *link {
	l := &link{closed: true}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	l.cancel()
	return l
}()

// linkOf returns nil for a client that is not ours.
func linkOf(ctx context.Context) *link {
	md, _ := metadata.FromOutgoingContext(ctx)
	ids := md.Get(innermd.ClintID)
	if len(ids) == 0 {
		return nil
	}
	links.RLock()
	defer links.RUnlock()
	// A retry of the client repeats each header; the last one counts.
	return links.byClientID[ids[len(ids)-1]]
}

// front is what the official client takes for its connection to target.
type front struct {
	target string
	cc     *grpc.ClientConn

	mu      sync.Mutex
	foreign golang.ClientConn // of clients that are not ours; nil until one calls
}

func newFront(target string, opts ...golang.ConnOption) (golang.ClientConn, error) {
	f := &front{target: target}
	cc, err := grpc.NewClient("passthrough:///"+target,
		grpc.WithTransportCredentials(insecure.NewCredentials()), // required by NewClient, never used
		grpc.WithUnaryInterceptor(func(ctx context.Context, method string, req, reply any, _ *grpc.ClientConn, _ grpc.UnaryInvoker, callOpts ...grpc.CallOption) error {
			if l := linkOf(ctx); l != nil {
				return l.invoke(ctx, f.target, method, req, reply, callOpts...)
			}
			conn, err := f.foreignConn(opts)
			if err != nil {
				return err
			}
			return conn.Conn().Invoke(ctx, method, req, reply, callOpts...)
		}),
		grpc.WithStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, _ *grpc.ClientConn, method string, _ grpc.Streamer, callOpts ...grpc.CallOption) (grpc.ClientStream, error) {
			if l := linkOf(ctx); l != nil {
				return l.stream(ctx, f.target, desc, method, callOpts...)
			}
			conn, err := f.foreignConn(opts)
			if err != nil {
				return nil, err
			}
			return conn.Conn().NewStream(ctx, desc, method, callOpts...)
		}),
	)
	if err != nil {
		return nil, err
	}
	// Closing it ends its goroutines. Its interceptors are still called, and they
	// are all that is wanted of it.
	if err := cc.Close(); err != nil {
		return nil, err
	}
	f.cc = cc
	return f, nil
}

// Conn implements golang.ClientConn.
func (f *front) Conn() *grpc.ClientConn { return f.cc }

// Close implements golang.ClientConn. The client calls it on every Unavailable;
// the connections of a link live on, since gRPC mends them by itself.
func (f *front) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.foreign == nil {
		return nil
	}
	conn := f.foreign
	f.foreign = nil
	return conn.Close()
}

func (f *front) foreignConn(opts []golang.ConnOption) (golang.ClientConn, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.foreign == nil {
		conn, err := golang.NewClientConn(f.target, opts...)
		if err != nil {
			return nil, err
		}
		f.foreign = conn
	}
	return f.foreign, nil
}
