//! What passes in f32 and in bf16 do in different ways.

use elastic_cuda::{After, Attends, Bf16, Buffer, CudaError, CudaView, CudaViewMut, Epilogue, Gpu, Matrix};

/// Numbers that products take.
pub(super) trait Numbers: Attends + Default {
    /// The vocabulary is padded with zeros to a multiple of this.
    const TOKENS: usize;

    /// The parameters, with so many zeros, `gap`, behind the first `before` of them.
    fn weights<'a>(
        gpu: &Gpu,
        parameters: CudaView<'a, f32>,
        before_and_gap: (usize, usize),
        room: &'a mut Buffer<Self>,
    ) -> Result<CudaView<'a, Self>, CudaError>;

    /// Of the stream's derivative and the same rounded, the one that products take.
    fn of_stream<'a>(stream: &'a Buffer<f32>, rounded: &'a Buffer<Bf16>) -> &'a Buffer<Self>;

    fn product(
        gpu: &Gpu,
        out: &mut CudaViewMut<'_, Self>,
        left: &Matrix<'_, Self>,
        right: &Matrix<'_, Self>,
        epilogue: Epilogue<'_, Self>,
    ) -> Result<(), CudaError>;

    /// A product into f32, which replaces `out`, or is added to it.
    fn product_to_f32(
        gpu: &Gpu,
        out: &mut CudaViewMut<'_, f32>,
        left: &Matrix<'_, Self>,
        right: &Matrix<'_, Self>,
        adds_with_room: Option<&mut Buffer<f32>>,
    ) -> Result<(), CudaError>;
}

impl Numbers for f32 {
    const TOKENS: usize = 1;

    fn weights<'a>(
        _: &Gpu,
        parameters: CudaView<'a, f32>,
        _: (usize, usize),
        _: &'a mut Buffer<f32>,
    ) -> Result<CudaView<'a, f32>, CudaError> {
        Ok(parameters)
    }

    fn of_stream<'a>(stream: &'a Buffer<f32>, _: &'a Buffer<Bf16>) -> &'a Buffer<f32> {
        stream
    }

    fn product(
        gpu: &Gpu,
        out: &mut CudaViewMut<'_, f32>,
        left: &Matrix<'_>,
        right: &Matrix<'_>,
        epilogue: Epilogue<'_, f32>,
    ) -> Result<(), CudaError> {
        match epilogue {
            Epilogue::Plain => gpu.product(out, left, right, &After::Plain),
            Epilogue::Bias(bias) => gpu.product(out, left, right, &After::Bias(bias)),
            Epilogue::Gelu { bias, mut inputs } => {
                gpu.product(&mut inputs, left, right, &After::Bias(bias))?;
                gpu.gelu(&inputs.as_view(), out)
            }
            Epilogue::GeluSlope(inputs) => {
                gpu.product(out, left, right, &After::Plain)?;
                gpu.gelu_slope(&inputs, out)
            }
        }
    }

    fn product_to_f32(
        gpu: &Gpu,
        out: &mut CudaViewMut<'_, f32>,
        left: &Matrix<'_>,
        right: &Matrix<'_>,
        adds_with_room: Option<&mut Buffer<f32>>,
    ) -> Result<(), CudaError> {
        let Some(room) = adds_with_room else { return gpu.product(out, left, right, &After::Plain) };
        let mut part = room.fit(gpu, out.len())?;
        gpu.product(&mut part, left, right, &After::Plain)?;
        gpu.add_part(out, &part.as_view())
    }
}

impl Numbers for Bf16 {
    /// Tensor cores like it.
    const TOKENS: usize = 128;

    fn weights<'a>(
        gpu: &Gpu,
        parameters: CudaView<'a, f32>,
        (before, gap): (usize, usize),
        room: &'a mut Buffer<Bf16>,
    ) -> Result<CudaView<'a, Bf16>, CudaError> {
        gpu.round_parameters(&parameters, (before, gap), &mut room.fit(gpu, parameters.len() + gap)?)?;
        Ok(room.view())
    }

    fn of_stream<'a>(_: &'a Buffer<f32>, rounded: &'a Buffer<Bf16>) -> &'a Buffer<Bf16> {
        rounded
    }

    fn product(
        gpu: &Gpu,
        out: &mut CudaViewMut<'_, Bf16>,
        left: &Matrix<'_, Bf16>,
        right: &Matrix<'_, Bf16>,
        epilogue: Epilogue<'_>,
    ) -> Result<(), CudaError> {
        gpu.product_bf16(out, left, right, epilogue)
    }

    fn product_to_f32(
        gpu: &Gpu,
        out: &mut CudaViewMut<'_, f32>,
        left: &Matrix<'_, Bf16>,
        right: &Matrix<'_, Bf16>,
        adds_with_room: Option<&mut Buffer<f32>>,
    ) -> Result<(), CudaError> {
        gpu.product_bf16_to_f32(out, left, right, adds_with_room.is_some())
    }
}
